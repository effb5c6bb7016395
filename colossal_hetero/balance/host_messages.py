"""The balancer's messages: small, on the host, beside the training's own.

They travel over Gloo groups of their own, so that asking "did anyone's speed move?" neither waits for a GPU nor mixes
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
        """Start asking whether any rank raised its flag in this iteration; :meth:`take_flag` has the answer.

        ``digest`` stands for the plan that this rank's layers follow.
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
        """Everyone's times by rank in the group, the same on all ranks; None if some rank has none yet."""
        own = (float("nan"),) * 3
        if times is not None:
            own = (times.work_seconds, times.matmul_seconds, times.communication_seconds)
        mine = torch.tensor(own, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self._group)
        if any(bool(values.isnan().any()) for values in everyone):
            return None
        return [RankTimes(*values.tolist()) for values in everyone]

    def check_same(self, digest: int) -> None:
        """Make sure, before a plan is followed, that all ranks have decided the same.

        Raises:
            RuntimeError: they have not.
        """
        digests = torch.tensor([digest, -digest], dtype=torch.int64)
        dist.all_reduce(digests, op=dist.ReduceOp.MAX, group=self._group)
        if digests[0] != -digests[1]:
            raise RuntimeError(_DIFFERENT_PLANS)

    def all_agree(self, yes: bool) -> bool:
        """Whether every rank says yes."""
        vote = torch.tensor([yes], dtype=torch.int64)
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._group)
        return bool(vote.item())


_DIFFERENT_PLANS = (
    "the ranks of a tensor-parallel group hold different balancing plans, so that their sums would be wrong; training "
    "stops here. Do all ranks run the same version of colossal_hetero and numpy, with the same BalanceConfig?"
)


@dataclass(frozen=True)
class Groups:
    """What a rank's balancer talks through."""

    exchange: Exchange
    """With its tensor-parallel group."""
    world: dist.ProcessGroup
    """All ranks, over Gloo."""
    tensor_parallel: list[list[int]]
    """All tensor-parallel groups as lists of global ranks."""
    migration: dist.ProcessGroup
    """Its tensor-parallel group, for migrated work, over the backend of the training."""


def make_groups(tp_group: dist.ProcessGroup) -> Groups:
    """New process groups for the balancer of this rank. Collective over all ranks."""
    world = dist.new_group(backend="gloo")
    own = dist.get_process_group_ranks(tp_group)
    gathered: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own, group=world)
    groups = sorted({tuple(ranks) for ranks in gathered})
    exchange = migration = None
    for ranks in groups:
        group = dist.new_group(list(ranks), backend="gloo")
        beside = dist.new_group(list(ranks))
        if list(ranks) == own:
            exchange, migration = Exchange(group), beside
    assert exchange is not None and migration is not None
    return Groups(exchange, world, [list(ranks) for ranks in groups], migration)
