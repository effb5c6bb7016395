"""Export of a checkpoint as one file with the parameters of the whole model, which other programs load."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from ..common.atomic_files import replacing
from .config import CheckpointError
from .found import FolderPlace
from .pieces import TensorPiece, whole
from .reader import CheckpointReader

__all__ = ["default_ending", "export"]

MODEL = ("param.", "buffer.")
"""Beginnings of the keys of tensors that belong to the model, not to the optimizer."""


def default_ending() -> str:
    return ".pt" if importlib.util.find_spec("safetensors") is None else ".safetensors"


def export(folder: Path, out: Path, step: int | None = None) -> tuple[int, int]:
    """Write parameters and buffers, by their names in the model of one process; returns the step and their number."""
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
