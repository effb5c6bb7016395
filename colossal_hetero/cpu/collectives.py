"""Reduce-scatter over Gloo: with lists, which Gloo does not have, and with less work than Gloo's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from colossalai.shardformer.layer import _operation

from ..module_proxy import ModuleProxy

__all__ = ["patch", "reduce_scatter", "sent_directly"]

TAG = 7083
"""Tag of the messages, so that they are not mistaken for others between the same ranks."""


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


class _PartsInFlight:
    """A sum of which every rank gets its part, as the handle of a collective.

    Args:
        output: this rank's part of the sum.
        input: all parts of this rank; must not change before :meth:`wait`.
        ranks: global ranks of the group.
        group: the ranks that sum.
    """

    def __init__(
        self, output: torch.Tensor, input: torch.Tensor, ranks: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self._output = output
        self._parts = list(input.detach().view(-1).split(output.numel()))
        self._own = ranks.index(dist.get_rank())
        self._received = [torch.empty_like(part) for part in self._parts]
        self._received[self._own] = self._parts[self._own]
        self._messages: list[dist.Work | None] = []
        for index, rank in enumerate(ranks):
            if index != self._own:
                self._messages.append(dist.isend(self._parts[index], rank, group, TAG))
                self._messages.append(dist.irecv(self._received[index], rank, group, TAG))

    def is_completed(self) -> bool:
        return not self._messages

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the parts of the other ranks, and add them in the order of the ranks."""
        if self._messages:
            for message in self._messages:
                if message is not None:
                    message.wait()
            total = self._received[0].clone() if self._own == 0 else self._received[0]
            for part in self._received[1:]:
                total += part
            self._output.detach().view(-1).copy_(total)
            self._messages, self._parts, self._received = [], [], []
        return True


def sent_directly(reduce_scatter_tensor: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.distributed.reduce_scatter_tensor``, in which every rank sends the others their parts and adds its own.

    Gloo's implementation sums all parts on all ranks. That sends twice as much and takes more than twice the CPU time,
    which matters on a rank that has little of it: FSDP (stage 3) and ZeRO stages 1 and 2 sum gradients. The parts are
    added in the order of the ranks. Other backends and other operations than a sum use the given function.
    """

    @functools.wraps(reduce_scatter_tensor)
    def run(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        group = group or dist.group.WORLD
        assert group is not None
        is_simple = op == dist.ReduceOp.SUM and output.is_contiguous() and input.is_contiguous()
        ranks = [] if dist.get_rank(group) < 0 else dist.get_process_group_ranks(group)
        fits = input.numel() == output.numel() * len(ranks) and output.dtype == input.dtype
        if not (is_simple and fits and len(ranks) > 1 and input.device.type == "cpu" and _is_gloo(group)):
            return reduce_scatter_tensor(output, input, op, group, async_op)
        work = _PartsInFlight(output, input, ranks, group)
        if async_op:
            return work
        work.wait()
        return None

    return run


def _is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` sends tensors of a CPU over Gloo, also if GPUs of the group have another backend."""
    return "cpu:gloo" in dist.get_backend_config(group)


def patch() -> None:
    """Let sequence parallelism (``split_gather`` and ``ring``) and sharded gradients use these functions over Gloo."""
    dist.reduce_scatter_tensor = sent_directly(dist.reduce_scatter_tensor)
    _operation.dist = ModuleProxy(dist, reduce_scatter=reduce_scatter)
