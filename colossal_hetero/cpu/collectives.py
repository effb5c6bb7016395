"""Collectives of Colossal-AI's sequence parallelism that Gloo does not have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from colossalai.shardformer.layer import _operation

from .module_proxy import ModuleProxy

__all__ = ["patch", "reduce_scatter"]


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """``torch.distributed.reduce_scatter`` in terms of ``reduce_scatter_tensor``, which Gloo has.

    ``output`` must be contiguous; ``input_list`` has one tensor of the same shape per rank.
    """
    inputs = torch.cat([piece.reshape(-1) for piece in input_list])
    return dist.reduce_scatter_tensor(output.view(-1), inputs, op, group, async_op)


def patch() -> None:
    """Let sequence parallelism (``split_gather`` and ``ring``) use reduce-scatter over Gloo."""
    _operation.dist = ModuleProxy(dist, reduce_scatter=reduce_scatter)
