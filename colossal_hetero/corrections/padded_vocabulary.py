"""Checkpoints of models whose vocabulary is padded to a multiple of 64 per tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from colossalai.checkpoint_io import hybrid_parallel_checkpoint_io
from colossalai.tensor.padded_tensor import api

__all__ = ["correct", "tp_partition_dim"]


def _restore_detach_and_clone(tensor: Any) -> torch.Tensor:
    """``_hijack_back_detach_and_clone`` that accepts copies of a padded tensor.

    A padded tensor has its own ``detach`` and ``clone``, which copy the sizes of the padding. Their results have these
    sizes too, so that they count as padded, but the methods of a normal tensor.
    """
    if hasattr(tensor, "_unpad_detach"):
        tensor.detach, tensor.clone = tensor._unpad_detach, tensor._unpad_clone
        del tensor._unpad_detach, tensor._unpad_clone
    return tensor


def tp_partition_dim(current_shape: Sequence[int], original_shape: Sequence[int], tp_size: int) -> int | None:
    """``search_tp_partition_dim`` that accepts padded parameters: the axis along which a parameter is sharded, or None.

    Args:
        current_shape: of this rank's part; all ranks have equal parts, and the last ones may end with padding.
        original_shape: of the parameter before it was padded and sharded.

    Raises:
        ValueError: the parts are too small to hold the parameter.
    """
    for axis, (current, original) in enumerate(zip(current_shape, original_shape, strict=True)):
        if original > current:
            if original > tp_size * current:
                raise ValueError(
                    f"{tp_size} tensor-parallel ranks with parts of shape {tuple(current_shape)} cannot hold a "
                    f"parameter of shape {tuple(original_shape)}; load it with as many ranks as the model was made for"
                )
            return axis
    return None


def correct() -> None:
    """Let checkpoints be written and read if the vocabulary is padded."""
    api._hijack_back_detach_and_clone = _restore_detach_and_clone
    hybrid_parallel_checkpoint_io.search_tp_partition_dim = tp_partition_dim
