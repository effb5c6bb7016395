"""The operations on files of which a save consists, so that tests can interrupt each of them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["FileOperations"]

PIECE_BYTES = 16 * 1024 * 1024
"""So many bytes are written at a time."""


class FileOperations:
    """Each method is one call of the operating system; all raise ``OSError`` as that does."""

    def create(self, path: Path) -> int:
        """Create a file, or empty it, for writing; returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of ``data``; returns how many bytes."""
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
        """Give a file or folder another name; an old file of that name is replaced."""
        os.replace(old, new)

    def make_folder(self, path: Path) -> None:
        """Make a folder, and those above it, if they are not there."""
        path.mkdir(parents=True, exist_ok=True)

    def remove_file(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)


def write_all(files: FileOperations, descriptor: int, data: memoryview) -> None:
    """Write all of ``data``."""
    data = data.cast("B")
    position = 0
    while position < data.nbytes:
        position += files.write(descriptor, data[position : position + PIECE_BYTES])


def write_file(files: FileOperations, path: Path, content: bytes) -> None:
    """Write a whole file, which is on the disk when this returns. It replaces an old one in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = files.create(temporary)
    try:
        write_all(files, descriptor, memoryview(content))
        files.sync(descriptor)
    finally:
        files.close(descriptor)
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
