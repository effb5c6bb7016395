"""A Gloo group can be destroyed at any moment, also while its threads still release the tensors of a collective."""

from datetime import timedelta

import torch
import torch.distributed as dist

from colossal_hetero.balance.host_messages import make_groups
from colossal_hetero.common.ranks import world_timeout
from tests.support.harness import run_ranks

TENSORS = 2000
"""In one collective. Its thread releases them one after the other, while this thread does the same."""


def destroy_after_collectives() -> None:
    for _ in range(10):
        group = dist.new_group()
        tensors = [torch.ones(1) for _ in range(TENSORS)]
        group.allreduce(tensors).wait()
        del tensors
        dist.destroy_process_group(group)
        del group


def test_a_group_is_destroyed_while_its_threads_release_tensors() -> None:
    run_ranks(2, destroy_after_collectives, timeout_seconds=20)


def timeouts() -> list[timedelta | None]:
    found = [world_timeout()]
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(minutes=7))
    groups = make_groups(dist.new_group([0]))
    options = [group._get_backend(torch.device("cpu")).options for group in (groups.world, groups.migration)]
    return [*found, world_timeout(), *(each._timeout for each in options)]


def test_other_groups_wait_as_long_as_the_default_group() -> None:
    assert run_ranks(1, timeouts) == [[None, *[timedelta(minutes=7)] * 3]]
