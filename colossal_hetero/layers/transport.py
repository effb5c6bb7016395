"""The messages of a migration within one tensor-parallel group, counted as they are sent.

They travel over a process group of their own, beside the training's collectives. Ranks are places in that group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Pending", "SentMessages", "Transport"]

Primitive = Literal["point_to_point", "broadcast", "reduce"]


@dataclass
class SentMessages:
    """What one rank has sent by one primitive."""

    messages: int = 0
    bytes: int = 0


class Pending:
    """Messages under way."""

    def __init__(self, works: Iterable[Any]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        """Return when they have arrived.

        Raises:
            RuntimeError: a rank of the group is gone.
        """
        works, self._works = self._works, []
        _or_say_why(lambda: [work.wait() for work in works])


class Transport:
    """Sends and receives for one rank of a tensor-parallel group.

    ``sent`` counts this rank's payload: a broadcast's root delivers to each of the others, and each of the others
    delivers what a reduction adds up.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._global_ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.size = len(self._global_ranks)
        self._connected = False
        self.sent: dict[Primitive, SentMessages] = {}
        self.reset()

    def reset(self) -> None:
        """Count from nothing again."""
        self.sent = {"point_to_point": SentMessages(), "broadcast": SentMessages(), "reduce": SentMessages()}

    def connect(self, device: torch.device) -> None:
        """Make the group's connections, if that has not been done. Collective over the group.

        NCCL makes a communicator at its first use, for which all ranks must come together; later only some do.
        """
        if not self._connected:
            self._connected = True
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Pending:
        """Start sending tensors to ranks and receiving into others from ranks, all contiguous.

        Two ranks must name what they send each other in the same order.
        """
        operations = [
            dist.P2POp(dist.irecv, tensor, self._global_ranks[rank], self._group) for rank, tensor in receives
        ]
        operations += [dist.P2POp(dist.isend, tensor, self._global_ranks[rank], self._group) for rank, tensor in sends]
        for _, tensor in sends:
            self._count("point_to_point", tensor, 1)
        if not operations:
            return Pending(())
        return Pending(_or_say_why(lambda: dist.batch_isend_irecv(operations)))

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        """Start giving everyone the contiguous ``tensor`` of rank ``source``."""
        if source == self.rank:
            self._count("broadcast", tensor, self.size - 1)
        source = self._global_ranks[source]
        return Pending([_or_say_why(lambda: dist.broadcast(tensor, source, group=self._group, async_op=True))])

    def reduce(self, tensor: Tensor, target: int) -> Pending:
        """Start summing everyone's contiguous ``tensor`` into that of rank ``target``; the others' become scratch."""
        if target != self.rank:
            self._count("reduce", tensor, 1)
        target = self._global_ranks[target]
        return Pending([_or_say_why(lambda: dist.reduce(tensor, target, group=self._group, async_op=True))])

    def _count(self, primitive: Primitive, tensor: Tensor, copies: int) -> None:
        sent = self.sent[primitive]
        sent.messages += copies
        sent.bytes += copies * tensor.numel() * tensor.element_size()


def _or_say_why(communicate: Callable[[], Any]) -> Any:
    try:
        return communicate()
    except RuntimeError as error:
        raise RuntimeError(
            "a rank of this tensor-parallel group stopped answering while migrated work was under way; "
            f"look at what the other ranks printed. The transport says: {error}"
        ) from error
