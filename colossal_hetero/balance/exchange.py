"""The balancer's messages: small, on the host, beside the training's own.

They travel over Gloo groups of their own, so that asking "did anyone's speed move?" neither waits for a GPU nor mixes
with the collectives of the model.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .decide import RankTimes

__all__ = ["Exchange", "make_exchanges"]

T = TypeVar("T")


class Exchange:
    """The messages of one tensor-parallel group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._flag: torch.Tensor | None = None
        self._pending: Any = None

    @property
    def size(self) -> int:
        return self._group.size()

    def post_flag(self, raised: bool) -> None:
        """Start asking whether any rank raised its flag in this iteration; :meth:`take_flag` has the answer."""
        self._flag = torch.tensor([raised], dtype=torch.int32)
        self._pending = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def take_flag(self) -> bool:
        """The answer to the last :meth:`post_flag`, the same on all ranks; False if there was none."""
        if self._pending is None:
            return False
        assert self._flag is not None
        self._pending.wait()
        self._pending = None
        return bool(self._flag.item())

    def gather(self, times: RankTimes | None) -> list[RankTimes] | None:
        """Everyone's times by rank in the group, the same on all ranks; None if some rank has none yet."""
        own = (times.work_seconds, times.matmul_seconds) if times else (float("nan"), float("nan"))
        mine = torch.tensor(own, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self._group)
        if any(bool(values.isnan().any()) for values in everyone):
            return None
        return [RankTimes(*values.tolist()) for values in everyone]


def make_exchanges(tp_group: dist.ProcessGroup) -> tuple[Exchange, dist.ProcessGroup, list[list[int]]]:
    """This rank's exchange, a Gloo group of all ranks, and all tensor-parallel groups as lists of global ranks.

    Collective over all ranks.
    """
    world = dist.new_group(backend="gloo")
    own = dist.get_process_group_ranks(tp_group)
    gathered: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own, group=world)
    groups = sorted({tuple(ranks) for ranks in gathered})
    exchange = None
    for ranks in groups:
        group = dist.new_group(list(ranks), backend="gloo")
        if list(ranks) == own:
            exchange = Exchange(group)
    assert exchange is not None
    return exchange, world, [list(ranks) for ranks in groups]
