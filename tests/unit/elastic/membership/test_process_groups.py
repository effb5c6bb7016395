"""The time limit of a world's groups, whatever their backend."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from colossal_hetero.elastic.process_groups import ProcessGroups
from colossal_hetero.elastic.world import World


def test_the_limit_holds_for_groups_of_all_backends_until_they_are_destroyed() -> None:
    def limits() -> list[timedelta]:
        return [distributed_c10d._get_default_timeout(backend) for backend in ("gloo", "nccl")]

    before = limits()
    groups = ProcessGroups(7.0)
    groups.initialize(dist.HashStore(), World(0, 1, 0, ("a",)))
    assert limits() == [timedelta(seconds=7)] * 2
    groups.destroy()
    assert limits() == before
