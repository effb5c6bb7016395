"""Tensor-parallel shards of a model to measure, as :class:`~colossal_hetero.HeteroHybridParallelPlugin` makes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...layers.policy import hetero_policy

# isort: split
from colossalai.shardformer import ShardConfig, ShardFormer

__all__ = ["check_degrees", "own_group", "shard"]


def check_degrees(model: nn.Module, degrees: Sequence[int], ranks_per_node: int) -> None:
    """Check tensor-parallel degrees before anything is measured.

    Args:
        model: the whole model, also on the meta device.
        degrees: numbers of ranks that share each layer.
        ranks_per_node: ranks on each machine; a tensor-parallel group stays on one.

    Raises:
        ValueError: there are too few ranks, they cannot be divided into groups, or the heads cannot be divided.
    """
    heads = _attention_heads(model)
    for degree in degrees:
        if ranks_per_node < degree:
            raise ValueError(
                f"tensor parallel {degree} needs {degree} devices on this machine, but there "
                f"{'is' if ranks_per_node == 1 else 'are'} {ranks_per_node}; measure degrees of at most "
                f"{ranks_per_node}"
            )
        if ranks_per_node % degree:
            raise ValueError(
                f"{ranks_per_node} ranks cannot be divided into tensor-parallel groups of {degree}; start a multiple "
                f"of {degree}"
            )
        if heads is not None and heads % degree:
            raise ValueError(
                f"tensor parallel {degree} does not divide the {heads} attention heads of {type(model).__name__}; use "
                f"a divisor of {heads}"
            )


def own_group(degree: int, device: torch.device) -> dist.ProcessGroup:
    """A new group of ``degree`` neighboring ranks that this rank is in, over NCCL on a GPU, else over Gloo.

    Collective over all ranks. Their number must be a multiple of ``degree`` (see :func:`check_degrees`).
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    own, _ = dist.new_subgroups(degree, backend=backend)
    return own


def shard(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """This rank's shard of ``model``, which is changed.

    Raises:
        ValueError: Colossal-AI has no policy for the model, or the policy cannot divide it by the size of the group.
    """
    config = ShardConfig(tensor_parallel_process_group=group, enable_tensor_parallelism=True)
    try:
        return ShardFormer(config).optimize(model, policy=hetero_policy(model))[0]
    except AssertionError as error:
        raise ValueError(f"{type(model).__name__} cannot be divided over {group.size()} ranks: {error}") from error


def _attention_heads(model: nn.Module) -> int | None:
    """The number of attention heads; None if the model does not say."""
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        heads = next((each.num_heads for each in model.modules() if hasattr(each, "num_heads")), None)
    return heads if isinstance(heads, int) else None
