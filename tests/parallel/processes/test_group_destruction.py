"""A Gloo group can be destroyed at any moment, also while its threads still release the tensors of a collective."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.support.harness import run_ranks

TENSORS = 2000
"""In one collective. Its thread releases them one after the other, while this thread does the same."""
GROUPS = 10


def destroy_after_collectives() -> int:
    for _ in range(GROUPS):
        group = dist.new_group()
        tensors = [torch.ones(1) for _ in range(TENSORS)]
        group.allreduce(tensors).wait()
        del tensors
        dist.destroy_process_group(group)
        del group
    return GROUPS


def test_a_group_is_destroyed_while_its_threads_release_tensors() -> None:
    assert run_ranks(2, destroy_after_collectives, timeout_seconds=20) == [GROUPS, GROUPS]
