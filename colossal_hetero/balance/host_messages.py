"""The balancer's messages between ranks: small ones, sent from the host.

They use separate Gloo groups, so that asking whether a rank's speed has changed neither waits for a GPU nor interferes
with the collectives of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .decide.plan import RankTimes

__all__ = ["Exchange", "Groups", "make_groups"]


class Exchange:
    """The messages of one tensor-parallel group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._flag: torch.Tensor | None = None
        self._pending: Any = None

    @property
    def size(self) -> int:
        return self._group.size()

    def post_flag(self, raised: bool, digest: int) -> None:
        """Start asking whether any rank raises its flag in this iteration; :meth:`take_flag` returns the answer.

        ``digest`` is the hash of the plan that this rank follows.
        """
        self._flag = torch.tensor([raised, digest, -digest], dtype=torch.int64)
        self._pending = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def take_flag(self) -> bool:
        """The answer to the last :meth:`post_flag`, the same on all ranks; False if there was none.

        Raises:
            RuntimeError: ranks follow different plans.
        """
        if self._pending is None:
            return False
        assert self._flag is not None
        self._pending.wait()
        self._pending = None
        raised, largest, smallest = self._flag.tolist()
        if largest != -smallest:
            raise RuntimeError(_DIFFERENT_PLANS)
        return bool(raised)

    def gather(self, times: RankTimes | None) -> list[RankTimes] | None:
        """The times of all ranks of the group, equal on all ranks; None if some rank has none yet."""
        values = (float("nan"),) * 3
        if times is not None:
            values = (times.work_seconds, times.matmul_seconds, times.communication_seconds)
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self._group)
        if any(bool(rank.isnan().any()) for rank in everyone):
            return None
        return [RankTimes(*rank.tolist()) for rank in everyone]

    def check_same(self, digest: int) -> None:
        """Check that all ranks have decided on the same plan, before they follow it.

        Raises:
            RuntimeError: the plans differ.
        """
        digests = torch.tensor([digest, -digest], dtype=torch.int64)
        dist.all_reduce(digests, op=dist.ReduceOp.MAX, group=self._group)
        if digests[0] != -digests[1]:
            raise RuntimeError(_DIFFERENT_PLANS)

    def all_agree(self, yes: bool) -> bool:
        """Whether ``yes`` is true on every rank."""
        vote = torch.tensor([yes], dtype=torch.int64)
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._group)
        return bool(vote.item())


_DIFFERENT_PLANS = (
    "the ranks of a tensor-parallel group have different balancing plans, which would make their sums wrong; training "
    "is stopped. Check that all ranks use the same versions of colossal_hetero and numpy, and the same BalanceConfig"
)


@dataclass(frozen=True)
class Groups:
    """The process groups of a rank's balancer."""

    exchange: Exchange
    """The messages of its tensor-parallel group."""
    world: dist.ProcessGroup
    """All ranks, over Gloo."""
    tensor_parallel: list[list[int]]
    """All tensor-parallel groups, as lists of global ranks."""
    migration: dist.ProcessGroup
    """Its tensor-parallel group for migrated work, with the backend of the training."""


def make_groups(tp_group: dist.ProcessGroup) -> Groups:
    """New process groups for the balancer of this rank. Collective over all ranks."""
    world = dist.new_group(backend="gloo")
    members = dist.get_process_group_ranks(tp_group)
    gathered: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, members, group=world)
    groups = sorted({tuple(ranks) for ranks in gathered})
    exchange = migration = None
    for ranks in groups:
        group = dist.new_group(list(ranks), backend="gloo")
        beside = dist.new_group(list(ranks))
        if list(ranks) == members:
            exchange, migration = Exchange(group), beside
    assert exchange is not None and migration is not None
    return Groups(exchange, world, [list(ranks) for ranks in groups], migration)
