"""Small messages of the balancer between ranks, sent from the host over separate Gloo groups, so that asking whether a
rank's speed has changed neither waits for a GPU nor interferes with the collectives of the model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..common.ranks import of_every_rank, world_timeout

MIGRATION_CTAS = 4  # largest number of a GPU's processors (of 132 on an H100) that NCCL uses for migrated work
VOTE_TIMEOUT = timedelta(minutes=5)
"""Time by which others may be later than this rank at a pass in which they first look inside of blocks."""


class Exchange:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._table: torch.Tensor | None = None
        self._pending: Any = None
        self._rows: dict[int, dict[int, list[float]]] = {}

    @property
    def size(self) -> int:
        return self._group.size()

    def post(self, iteration: int, numbers: Sequence[float], digest: int) -> None:
        """Start telling all ranks this rank's ``numbers`` of an iteration, equally many on all ranks, without waiting.
        A rank that knows none yet (a GPU's clock is late) posts iteration −1. ``digest`` is the hash of its plan."""
        self._table = torch.zeros(self.size, 2 + len(numbers), dtype=torch.float64)
        self._table[self._group.rank()] = torch.tensor([iteration, digest, *numbers], dtype=torch.float64)
        self._pending = dist.all_reduce(self._table, group=self._group, async_op=True)

    def take(self) -> list[list[list[float]]]:
        """Numbers ``[iteration][rank][number]`` that became known to all since the last call; equal on all ranks."""
        if self._pending is None:
            return []
        self._pending.wait()
        self._pending = None
        assert self._table is not None
        table = self._table.tolist()
        if any(row[1] != table[0][1] for row in table):
            raise RuntimeError(_DIFFERENT_PLANS)
        for rank, (iteration, _, *numbers) in enumerate(table):
            if iteration >= 0:
                self._rows.setdefault(int(iteration), {})[rank] = numbers
        complete = sorted(iteration for iteration, rows in self._rows.items() if len(rows) == self.size)
        return [[numbers for _, numbers in sorted(self._rows.pop(iteration).items())] for iteration in complete]

    def check_same(self, *digests: int) -> None:
        """Check that the plans with these hashes are the same on all ranks, before they follow the last one."""
        if not self.all_equal(*digests):
            raise RuntimeError(_DIFFERENT_PLANS)

    def all_equal(self, *numbers: int) -> bool:
        """True if the ``numbers``, below 2⁶³, are the same on every rank."""
        largest = torch.tensor([numbers, [-number for number in numbers]], dtype=torch.int64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return torch.equal(largest[0], -largest[1])

    def anywhere(self, conditions: Sequence[bool], timeout: timedelta | None = None) -> list[bool] | None:
        """True for conditions that are true on some rank; None if some rank has not asked within ``timeout``."""
        votes = torch.tensor(conditions, dtype=torch.uint8)
        begin = time.monotonic()
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        try:
            work.wait(*([] if timeout is None else [timeout]))
        except RuntimeError:
            # Otherwise a rank has ended.
            if timeout is None or time.monotonic() - begin < timeout.total_seconds():
                raise
            return None
        return votes.bool().tolist()

    def all_agree(self, yes: bool) -> bool:
        return self.anywhere([not yes]) == [False]


_DIFFERENT_PLANS = (
    "the ranks of a tensor-parallel group have different balancing plans, which would make their sums wrong; training "
    "is stopped. Check that all ranks use the same versions of colossal_hetero and numpy, and the same BalanceConfig"
)


@dataclass(frozen=True)
class Groups:
    exchange: Exchange
    votes: Exchange  # the same group, for messages that ranks may send although others do not expect them
    world: dist.ProcessGroup
    tensor_parallel: list[list[int]]  # all tensor-parallel groups, as lists of global ranks
    migration: dist.ProcessGroup  # its tensor-parallel group for migrated work, with the backend of the training


def make_groups(tp_group: dist.ProcessGroup) -> Groups:
    """New process groups for the balancer of this rank. Collective over all ranks."""
    timeout = world_timeout()
    world = dist.new_group(backend="gloo", timeout=timeout)
    members = dist.get_process_group_ranks(tp_group)
    groups = sorted({tuple(ranks) for ranks in of_every_rank(members, world)})
    exchange = votes = migration = None
    for ranks in groups:
        group = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
        other = dist.new_group(list(ranks), backend="gloo", timeout=VOTE_TIMEOUT)
        beside = dist.new_group(list(ranks), timeout=timeout, pg_options=_few_processors(dist.get_backend()))
        if list(ranks) == members:
            exchange, votes, migration = Exchange(group), Exchange(other), beside
    assert exchange is not None and votes is not None and migration is not None
    return Groups(exchange, votes, world, [list(ranks) for ranks in groups], migration)


def launch_obstacle(nccl: tuple[int, ...], environment: Mapping[str, str], set_late: bool) -> str | None:
    """Reason why GPUs may run operations of two communicators in other orders than they were launched, or None."""
    keeps_order = nccl >= (2, 26) and environment.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1"
    has_one_queue = environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" and not set_late
    if keeps_order or has_one_queue:
        return None
    return (
        f"migrated work and collectives could run in different orders on different GPUs, and wait for each other "
        f"forever: NCCL {'.'.join(map(str, nccl))} with NCCL_LAUNCH_ORDER_IMPLICIT="
        f"{environment.get('NCCL_LAUNCH_ORDER_IMPLICIT')} does not keep the order (2.26 with 1 does), and "
        "CUDA_DEVICE_MAX_CONNECTIONS=1 was not set before CUDA was initialized: import colossal_hetero before "
        "anything uses a GPU, set the variable in the environment, or use balance mode 'off'"
    )


def _few_processors(backend: str) -> Any:
    """Options with which NCCL uses few of a GPU's processors, so that products run beside it; None for others."""
    if "nccl" not in backend:  # it may be "cpu:gloo,cuda:nccl"
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = 1
    options.config.max_ctas = MIGRATION_CTAS
    return options
