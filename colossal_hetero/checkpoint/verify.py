"""Contents of a folder of checkpoints, and a check of every byte of it. Without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .config import CheckpointError
from .found import Copy, FolderPlace, content_of, find_checkpoints
from .pieces import TEMPORARY
from .storage import DamagedCopy

__all__ = ["Entry", "damaged_files", "entries"]


@dataclass(frozen=True)
class Entry:
    name: str
    copy: Copy | None
    """The checkpoint; None if it is not complete."""
    faults: tuple[str, ...]
    bytes: int


def entries(root: Path, step: int | None = None) -> list[Entry]:
    """The checkpoints in a folder, the newest first, then what is not complete."""
    if not root.is_dir():
        raise CheckpointError(f"there is no folder {root}")
    place = FolderPlace(root)
    search = find_checkpoints([place])
    found = []
    for checkpoint in search.checkpoints:
        for copy in checkpoint.copies:
            faults = tuple(filter(None, map(copy.fault, copy.files)))
            found.append(Entry(copy.folder, copy, faults, _bytes(root / copy.folder)))
    names = {entry.name for entry in found}
    for folder in place.folders():
        if folder not in names:
            faults = (search.torn[f"{place.name}/{folder}"],)
            found.append(Entry(folder, None, faults, _bytes(root / folder)))
    for item in sorted(os.scandir(root), key=lambda each: each.name):
        if item.name.startswith(TEMPORARY) and item.is_dir():
            fault = "left by a save that was interrupted, or is being written; the next save removes it"
            found.append(Entry(item.name, None, (fault,), _bytes(root / item.name)))
    if step is not None:
        found = [entry for entry in found if entry.copy is not None and entry.copy.manifest.step == step]
    if not found:
        raise CheckpointError(f"{root} has no checkpoint" + ("" if step is None else f" of step {step}"))
    return found


def damaged_files(entry: Entry) -> Iterator[str]:
    """Read every byte of a checkpoint; yields what is wrong with each damaged file."""
    if entry.copy is None:
        yield from entry.faults
        return
    copy = entry.copy
    for name in (*copy.files, *copy.manifest.files):
        try:
            for _ in content_of(copy, name):
                pass
        except DamagedCopy as error:
            yield str(error)


def _bytes(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
