"""Sequence parallelism over the ranks of a tensor-parallel group (Colossal-AI's modes ``split_gather`` and ``ring``).

Outside of blocks each of the ``e`` ranks holds a part of the sequence of ``S`` positions::

    column-parallel   forward   X  [.., S, K] = gathered from the parts X [.., S/e, K] of all ranks
                      backward  dX [.., S, K] is summed over ranks; each rank keeps its part [.., S/e, K]
    row-parallel      forward   Y  [.., S, N] is summed over ranks; each rank keeps its part [.., S/e, N]
                      backward  dY [.., S, N] = gathered from the parts dY [.., S/e, N] of all ranks

So the products of a block see the whole sequence on every rank, as without sequence parallelism. Mode ``ring``
overlaps the gathering with the product of a column-parallel layer; here both modes compute the product afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..corrections.second_derivatives import without_second_derivatives
from .workload import Part

__all__ = ["SequenceParts", "sum_parts"]


class SequenceParts(NamedTuple):
    """A sequence that is divided evenly over the ranks of ``group``, along the dimension ``dim`` of each tensor."""

    group: dist.ProcessGroup
    dim: int

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    def gather(self, part: Tensor) -> Tensor:
        """The whole sequence ``[.., S, ..]``, from the ``part`` ``[.., S/e, ..]`` of each rank."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, self.dim)

    def start_sum(self, whole: Tensor) -> tuple[Tensor, Any]:
        """Start summing ``whole`` ``[.., S, ..]`` over the ranks.

        Returns this rank's part ``[.., S/e, ..]`` of the sum, and a handle to wait for before it is used.

        Raises:
            ValueError: the length of the sequence is no multiple of the number of ranks.
        """
        length, ranks = whole.shape[self.dim], self.ranks
        if length % ranks != 0:
            raise ValueError(
                f"a sequence of {length} positions cannot be divided over {ranks} ranks; with sequence parallelism, "
                f"pad it to a multiple of {ranks}"
            )
        parts = whole.unflatten(self.dim, (ranks, -1)).movedim(self.dim, 0).contiguous()
        own = torch.empty_like(parts[0])
        # The result has one dimension, because Gloo's operation compares numbers of elements along the first one.
        work = dist.reduce_scatter_tensor(own.view(-1), parts.view(-1), group=self.group, async_op=True)
        return own, work


@without_second_derivatives
class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, sequence: SequenceParts, mark: Callable[[Part], None]) -> Tensor:
        ctx.sequence, ctx.mark = sequence, mark
        own, work = sequence.start_sum(whole)
        work.wait()
        return own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.mark("other")
        whole = ctx.sequence.gather(gradient)
        ctx.mark("communication")
        return whole, None, None


def sum_parts(whole: Tensor, sequence: SequenceParts, mark: Callable[[Part], None]) -> Tensor:
    """This rank's part ``[.., S/e, ..]`` of the sum of ``whole`` ``[.., S, ..]`` over the ranks.

    The backward pass gathers the gradient of all parts, and calls ``mark`` before and after it does.
    """
    return _SumParts.apply(whole, sequence, mark)
