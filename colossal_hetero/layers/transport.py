"""Messages of a migration within one tensor-parallel group, counted as they are sent. They use a process group of their
own, separate from the training's collectives; ranks are numbered within it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..colossalai_support.accelerator import is_out_of_memory
from .workload import traced


def check_room(device: torch.device, more_bytes: int, more_work: float) -> None:
    """Raise ``RuntimeError`` if a GPU's next iteration would need more memory than there is: its peak so far,
    ``more_bytes``, and activations for ``more_work``, a share of its own; between iterations, most is free."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    # torch tells the fraction that was set from version 2.7 on.
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    limit = min(free + torch.cuda.memory_reserved(device), int(fraction * total))
    peak = torch.cuda.max_memory_allocated(device)
    activations = peak - torch.cuda.memory_allocated(device)
    needed = peak + more_bytes + int(more_work * activations)
    if needed > limit:
        raise RuntimeError(f"can't allocate memory: an iteration would need {needed} bytes, the GPU has {limit}")


Primitive = Literal["point_to_point", "broadcast", "reduce"]


@dataclass
class SentMessages:
    messages: int = 0
    bytes: int = 0


class Pending:
    def __init__(self, works: Iterable[Any]) -> None:
        self._works = [work for work in works if work is not None]

    @traced("wait")
    def wait(self) -> None:
        works, self._works = self._works, []
        _explaining_failure(lambda: [work.wait() for work in works])


class Started(NamedTuple):
    received: Pending
    sent: Pending  # needed only before the tensors that are sent change: it waits for the ranks that receive them

    def wait(self) -> None:
        self.received.wait()
        self.sent.wait()


class Transport:
    """Sends and receives for one rank of a tensor-parallel group. ``sent`` counts what this rank sends: the root of a
    broadcast one message to each other rank, each rank but the root of a reduction one message."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._global_ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.size = len(self._global_ranks)
        self._connected = False
        self.sent: dict[Primitive, SentMessages] = {}
        self.reset()

    def reset(self) -> None:
        self.sent = {"point_to_point": SentMessages(), "broadcast": SentMessages(), "reduce": SentMessages()}

    def connect(self, device: torch.device) -> None:
        """Set up the group's connections, once; collective. NCCL needs memory for a communicator at its first use, and
        for a connection at the first message of a pair, which torch's cache may have taken by then."""
        if self._connected:
            return
        self._connected = True
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        others = [rank for rank in self._global_ranks if rank != self._global_ranks[self.rank]]
        operations = [
            dist.P2POp(operation, torch.zeros(1, device=device), other, self._group)
            for other in others
            for operation in (dist.isend, dist.irecv)
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    @traced("migrate")
    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Started:
        """Start sending and receiving contiguous tensors, given as pairs of the other rank and the tensor. Two ranks
        must list the messages between them in the same order."""
        operations = [
            dist.P2POp(dist.irecv, tensor, self._global_ranks[rank], self._group) for rank, tensor in receives
        ]
        operations += [dist.P2POp(dist.isend, tensor, self._global_ranks[rank], self._group) for rank, tensor in sends]
        for _, tensor in sends:
            self._count("point_to_point", tensor, 1)
        if not operations:
            return Started(Pending(()), Pending(()))
        works = _explaining_failure(lambda: dist.batch_isend_irecv(operations))
        if len(works) != len(operations):
            # NCCL has one handle for all operations of a batch. Waiting makes the stream wait, not the host, so that
            # memory that was sent from is not used again before it has been sent.
            return Started(Pending(works if receives else ()), Pending(works))
        return Started(Pending(works[: len(receives)]), Pending(works[len(receives) :]))

    @traced("migrate")
    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Send rank ``source``'s contiguous ``tensor`` into the equally shaped ``tensor`` of all ranks."""
        if source == self.rank:
            self._count("broadcast", tensor, self.size - 1)
        _explaining_failure(lambda: dist.broadcast(tensor, self._global_ranks[source], group=self._group))

    @traced("migrate")
    def reduce(self, tensor: Tensor, target: int) -> None:
        """Sum the contiguous ``tensor`` of all ranks into rank ``target``'s; the others' are overwritten."""
        if target != self.rank:
            self._count("reduce", tensor, 1)
        _explaining_failure(lambda: dist.reduce(tensor, self._global_ranks[target], group=self._group))

    def _count(self, primitive: Primitive, tensor: Tensor, copies: int) -> None:
        sent = self.sent[primitive]
        sent.messages += copies
        sent.bytes += copies * tensor.numel() * tensor.element_size()


def _explaining_failure(communicate: Callable[[], Any]) -> Any:
    try:
        return communicate()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise RuntimeError(
            "a rank of this tensor-parallel group stopped responding while migrated work was being sent or received; "
            f"check the output of the other ranks. The communication library reports: {error}"
        ) from error
