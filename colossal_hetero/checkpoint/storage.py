"""The operations on files of which a save consists, so that tests can interrupt each of them."""

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .pieces import MANIFEST, REPLACED, TEMPORARY, step_folder, step_of
from .records import Manifest, parse_manifest

PIECE_BYTES = 16 * 1024 * 1024  # bytes that are written at a time


class DamagedCopy(Exception):
    """One copy of a file is missing, too short, or its check sums differ; another copy may be whole."""


class FileOperations:
    """Each method is one call of the operating system; all raise ``OSError`` as that does."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Return when what was written is on the disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder are on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def remove_file(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)


def write_all(files: FileOperations, descriptor: int, data: memoryview) -> None:
    data = data.cast("B")
    position = 0
    while position < data.nbytes:
        position += files.write(descriptor, data[position : position + PIECE_BYTES])


@contextmanager
def written(files: FileOperations, path: Path) -> Iterator[int]:
    """The descriptor of a new file, which is on the disk when the block ends."""
    descriptor = files.create(path)
    try:
        yield descriptor
        files.sync(descriptor)
    finally:
        files.close(descriptor)


def write_file(files: FileOperations, path: Path, content: Iterable[memoryview]) -> None:
    """Write a whole file, which is on the disk when this returns. It replaces an old one in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with written(files, temporary) as descriptor:
            for piece in content:
                write_all(files, descriptor, piece)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    files.rename(temporary, path)


def remove_all(files: FileOperations, folder: Path) -> None:
    """Remove a folder and the files in it. It is no error if others remove them at the same time."""
    try:
        names = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in names:
        try:
            if entry.is_dir(follow_symlinks=False):
                remove_all(files, Path(entry.path))
            else:
                files.remove_file(Path(entry.path))
        except FileNotFoundError:
            continue
    with suppress(FileNotFoundError):
        files.remove_folder(folder)


def folder_names(root: Path) -> list[str]:
    """Names of the folders of checkpoints, without those that a new one of the same step has replaced."""
    try:
        names = {entry.name for entry in os.scandir(root) if entry.is_dir() and step_of(entry.name) is not None}
    except FileNotFoundError:
        return []
    return sorted(name for name in names if not (name.endswith(REPLACED) and step_folder(step_of(name) or 0) in names))


def is_complete(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    return parse_manifest(str(path), path.read_bytes())


def complete_folders(root: Path) -> list[tuple[str, Manifest]]:
    """Folders of finished saves whose manifests can be read, the newest last."""
    found = []
    for name in folder_names(root):
        if is_complete(root / name):
            try:
                found.append((name, read_manifest(root / name)))
            except (ValueError, OSError):
                continue
    return sorted(found, key=lambda each: (each[1].saved_at, each[1].step))


def remove_leftovers(files: FileOperations, root: Path, in_use: str) -> None:
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return
    for name in names:
        if name.startswith(TEMPORARY) and not name.startswith(in_use):
            remove_all(files, root / name)
        elif name.endswith(REPLACED) and is_complete(root / step_folder(step_of(name) or 0)):
            _remove(files, root, name)


def remove_old(files: FileOperations, root: Path, keep: int, used: Collection[int]) -> None:
    for name, manifest in complete_folders(root)[:-keep]:
        if manifest.step not in used:
            _remove(files, root, name)


def _remove(files: FileOperations, root: Path, name: str) -> None:
    # It gets another name first: a folder of which some files are removed must not look like a checkpoint.
    gone = root / f".removed-{name}"
    remove_all(files, gone)
    files.rename(root / name, gone)
    remove_all(files, gone)
