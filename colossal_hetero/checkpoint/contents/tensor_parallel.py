"""How Colossal-AI's tensor parallelism has divided a parameter, read off the parameter and its module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from colossalai.shardformer.layer import FusedLinear1D_Row, GPT2FusedLinearConv1D_Col
from colossalai.tensor.d_tensor.api import get_shard_dim_1d, is_customized_distributed_tensor, is_distributed_tensor
from colossalai.tensor.padded_tensor import is_padded_tensor
from torch import Tensor, nn

from .division import LocalPart, divided, whole

__all__ = ["TensorDivision", "division_of"]


class TensorDivision(NamedTuple):
    """Which part of a tensor this rank has."""

    parts: tuple[LocalPart, ...]
    """Without padding."""
    shard: str
    """``tp0of2`` on rank 0 of a tensor-parallel group of two; ``whole`` if the tensor is not divided."""
    is_padded: bool
    """Whether some tensor-parallel rank has elements that are in no part."""


def division_of(tensor: Tensor, module: nn.Module, shape: Sequence[int], name: str) -> TensorDivision:
    """The part of a tensor that this rank has.

    Args:
        tensor: a parameter or a buffer, as Colossal-AI has divided it.
        module: the module that it is a parameter or buffer of.
        shape: of the tensor before it was divided and padded.
        name: of the tensor, for messages.

    Raises:
        ValueError: the tensor is divided in an unknown way.
    """
    shape = tuple(shape)
    given: Any = tensor
    padded = 0
    if is_padded_tensor(given):
        padded = given._current_length
    if is_distributed_tensor(given) and tuple(given.shape) != tuple(given.dist_layout.global_shape):
        dim = get_shard_dim_1d(given)
        group = given.dist_layout.device_mesh.get_process_group(axis=0)
        sections = [given.dist_layout.global_shape[dim]]
    elif is_customized_distributed_tensor(given) and hasattr(module, "split_sizes"):
        # Conv1D has the transposed weight of Linear, and a row-parallel layer divides the inputs.
        dim = -1 if isinstance(module, GPT2FusedLinearConv1D_Col | FusedLinear1D_Row) else 0
        group, sections = module.process_group, list(module.split_sizes)  # type: ignore[assignment]
    elif padded:
        dim = given._padding_dim
        division = TensorDivision(divided(shape, dim, [padded], 0, 1, padded), "whole", True)
        return _checked(division, tensor, shape, name)
    else:
        return _checked(TensorDivision(whole(shape), "whole", False), tensor, shape, name)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    parts = divided(shape, dim, sections, rank, ranks, padded)
    return _checked(TensorDivision(parts, f"tp{rank}of{ranks}", padded > 0), tensor, shape, name)


def _checked(division: TensorDivision, tensor: Tensor, shape: tuple[int, ...], name: str) -> TensorDivision:
    """Check that the parts fill the local tensor, except for padding."""
    stops = [part.local.offsets[dim] + part.local.sizes[dim] for part in division.parts for dim in range(tensor.dim())]
    fits = len(shape) == tensor.dim() and all(
        stop <= tensor.shape[number % tensor.dim()] for number, stop in enumerate(stops)
    )
    found = sum(part.local.numel for part in division.parts)
    if not fits or (found != tensor.numel() and not division.is_padded):
        raise ValueError(
            f"{name} has shape {list(shape)} in the model and {list(tensor.shape)} on this rank, which is not a "
            "division that layer checkpoints know; save this model with booster.save_model"
        )
    return division
