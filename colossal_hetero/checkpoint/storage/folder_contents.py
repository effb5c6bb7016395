"""Which checkpoints a folder holds, by the names of files alone, and removing old ones. Without torch."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from ..format.names import MANIFEST, METADATA, TEMPORARY, is_replaced, removed_folder, step_folder, step_of
from ..format.records import Manifest, parse_manifest
from .file_operations import FileOperations, remove_all

__all__ = ["complete_folders", "folder_names", "is_complete", "read_manifest", "remove_leftovers", "remove_old"]


def folder_names(root: Path) -> list[str]:
    """Names of the folders of checkpoints; empty if ``root`` is not there.

    A checkpoint that is about to be replaced counts only as long as the new one is not in its place.
    """
    try:
        names = {entry.name for entry in os.scandir(root) if entry.is_dir() and step_of(entry.name) is not None}
    except FileNotFoundError:
        return []
    return sorted(name for name in names if not (is_replaced(name) and step_folder(step_of(name) or 0) in names))


def is_complete(folder: Path) -> bool:
    """Whether a save was finished here: both indices are there."""
    return (folder / METADATA).is_file() and (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a folder.

    Raises:
        ValueError: it is damaged.
        OSError: it cannot be read.
    """
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


def remove_leftovers(files: FileOperations, root: Path, in_use: tuple[str, ...]) -> None:
    """Remove what interrupted saves and removals left.

    Args:
        files: the operations.
        root: the folder with all checkpoints.
        in_use: how the names of temporary folders start that are in use.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return
    for name in names:
        if name.startswith(TEMPORARY) and not name.startswith(in_use):
            remove_all(files, root / name)
        elif is_replaced(name) and is_complete(root / step_folder(step_of(name) or 0)):
            _remove(files, root, name)


def remove_old(files: FileOperations, root: Path, keep: int, used: Collection[int]) -> None:
    """Remove all checkpoints except the ``keep`` newest, and those of steps that are ``used``."""
    for name, manifest in complete_folders(root)[:-keep]:
        if manifest.step not in used:
            _remove(files, root, name)


def _remove(files: FileOperations, root: Path, name: str) -> None:
    # It gets another name first: a folder of which some files are removed must not look like a checkpoint.
    gone = root / removed_folder(name)
    remove_all(files, gone)
    files.rename(root / name, gone)
    remove_all(files, gone)
