"""Pieces of a model's tensors: what one rank holds, saves and loads.

A tensor of the whole model, as one process would hold it, may be divided among ranks by tensor parallelism and by ZeRO.
Each rank holds boxes of it. A part of a fused query-key-value weight is three boxes; a slice of a flattened tensor, as
ZeRO cuts it, is a few boxes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .box import Box

__all__ = ["Box", "TensorPiece"]


@dataclass(frozen=True)
class TensorPiece:
    """A box of a tensor, and the memory in which this rank has it: to save from, or to load into."""

    layer: str
    """The layer that the tensor belongs to, e.g. ``block-0007``, ``embedding`` or ``head``."""
    key: str
    """Name of the tensor in the checkpoint: what it is, a dot, and the name of the parameter in the model of one
    process, e.g. ``param.transformer.h.7.attn.c_attn.weight`` or ``exp_avg.transformer.h.7.attn.c_attn.weight``."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    data: Tensor
    """``[box.sizes]``: a view of the memory, of the type in which the tensor is saved."""
    shard: str
    """Names the division that the box belongs to, e.g. ``tp0of2``; the same on all ranks that hold the same boxes of a
    layer. A layer has one file for each of its shards."""
