"""What is in a folder of checkpoints, and whether every byte of it is as it was written. Without torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common.files import replacing
from .found import Copy, FolderPlace, content_of, find_checkpoints
from .pieces import TEMPORARY, TensorPiece, whole
from .reader import CheckpointReader
from .storage import CheckpointError, DamagedCopy

__all__ = ["Entry", "damaged_files", "default_ending", "entries", "export"]


@dataclass(frozen=True)
class Entry:
    """A folder of a checkpoint, or what an interrupted save has left."""

    name: str
    copy: Copy | None
    """None if it is no complete checkpoint."""
    faults: tuple[str, ...]
    """What is wrong, as far as names, sizes and small files tell."""
    bytes: int
    """Of all files."""


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


# Export --------------------------------------------------------------------------------------------------------------


MODEL = ("param.", "buffer.")
"""How the keys of tensors start that belong to the model, not to the optimizer."""


def default_ending() -> str:
    """``.safetensors`` if that package is there, else ``.pt``."""
    return ".pt" if importlib.util.find_spec("safetensors") is None else ".safetensors"


def export(folder: Path, out: Path, step: int | None = None) -> tuple[int, int]:
    """Write the parameters and buffers of a checkpoint, by their names in the model of one process.

    Returns:
        The step, and the number of tensors.
    """
    if out.suffix not in (".safetensors", ".pt"):
        raise ValueError(f"cannot tell the format of {out}: end its name in .safetensors or .pt")
    reader = CheckpointReader([FolderPlace(folder)])
    step = reader.latest() if step is None else step
    state: dict[str, torch.Tensor] = {}
    for key, (shape, dtype, layer) in reader.tensors(step).items():
        start = next((start for start in MODEL if key.startswith(start)), None)
        if start is not None:
            data = torch.empty(shape, dtype=dtype)
            reader.load([TensorPiece(layer, key, shape, whole(shape), data, "whole")], step)
            state[key.removeprefix(start)] = data
    if not state:
        raise CheckpointError(f"the checkpoint of step {step} in {folder} has no parameters")
    with replacing(out) as temporary:
        if out.suffix == ".pt":
            torch.save(state, temporary)
        else:
            from safetensors.torch import save_file

            save_file(state, temporary, metadata={"format": "pt"})
    return step, len(state)
