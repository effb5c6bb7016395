"""ADAPT in training (chapter 5): devices that slow down the others are left out, and ranks numbered in ring order."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from colossalai.cluster import DistCoordinator
from torch.distributed import distributed_c10d

from ...common.ranks import from_rank_0, print_on_rank_0, world_timeout
from ...common.text import duration, print_words, spans
from ...data_parallel.config import BatchConfig
from ...planner.batches.adapt import AdaptPlan, adapt_profile, with_cluster_links
from ...planner.batches.batch_profile import BatchProfile, load_profile
from ...planner.cluster.cluster_file import load_cluster

_former: list[dist.ProcessGroup] = []
"""Groups of all ranks that were launched. They stay open: an idle rank ends when rank 0's connection closes."""


def adapt_world(config: BatchConfig) -> BatchProfile | None:
    """With method ``adapt``, the profile of the ranks that train, which are numbered anew; None with another method, or
    without links in an existing profile. A rank that is left out does not return: it waits until the others have ended,
    and then ends with exit code 0. Called by all ranks, before groups are made."""
    if config.method != "adapt":
        return None
    path = Path(config.profile or "")
    profile = from_rank_0(lambda: _read(path, config.cluster) if path.is_file() else None)
    if profile is None or not profile.links:
        print_on_rank_0("all devices take part: leaving devices out needs the profile of an earlier run, and a cluster")
        return None
    if len(profile.ranks) != dist.get_world_size():
        raise ValueError(
            f"profile={str(config.profile)!r} is of {len(profile.ranks)} ranks, but {dist.get_world_size()} were "
            "started; start one rank for each device of the profile, in the same order"
        )
    plan = adapt_profile(profile, config.global_batch_size, profile.stage, config.accumulation)
    if plan.ring != tuple(range(len(profile.ranks))):
        _renumber(plan)
    return profile.of_ranks(plan.ring, plan.allocation.communication_seconds)


def _read(path: Path, cluster: str | Path | None) -> BatchProfile:
    profile = load_profile(path)
    return profile if cluster is None else with_cluster_links(profile, load_cluster(cluster))


def _renumber(plan: AdaptPlan) -> None:
    """Make a default group of the ranks in ``plan.ring``, in this order."""
    rank, limit, first = dist.get_rank(), world_timeout(), plan.ring[0]
    backend, store = dist.get_backend_config(), distributed_c10d._get_default_store()
    if rank == first:
        print_words(_in_words(plan))
    former = dist.new_group(timeout=timedelta(days=365), backend="gloo")
    assert isinstance(former, dist.ProcessGroup)
    dist.destroy_process_group()
    if rank not in plan.ring:
        _idle(former, first, rank)
    _former.append(former)
    new = plan.ring.index(rank)
    distributed_c10d._world.group_count = 0  # torch numbers groups, and an idle rank does not count on
    dist.init_process_group(
        backend, store=dist.PrefixStore("adapt", store), rank=new, world_size=len(plan.ring), timeout=limit
    )
    os.environ.update(RANK=str(new), WORLD_SIZE=str(len(plan.ring)))
    DistCoordinator().__init__()  # type: ignore[misc]  # Colossal-AI has one coordinator, which knows the former rank


def _idle(former: dist.ProcessGroup, first: int, rank: int) -> None:
    """Wait until the process with the former rank ``first`` has ended, and end this one."""

    def wait() -> None:
        with suppress(RuntimeError):  # the connection is closed
            former.recv([torch.empty(1)], first, 0).wait()

    # In a thread, because torch does not react to an interrupt while it waits.
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while waiting.is_alive():
        waiting.join(1.0)
    raise SystemExit(0)


def _in_words(plan: AdaptPlan) -> str:
    before, after = (duration(seconds) for seconds in (plan.steps[0].cost_seconds, plan.cost_seconds))
    reasons = "; ".join(step.reason for step in plan.steps if step.kept and step.without)
    words = f"numbered as in the fastest ring, these ranks train: {' → '.join(map(str, plan.ring))}"
    if not plan.dropped:
        return words
    names = f"rank {spans(plan.dropped)} idles" if len(plan.dropped) == 1 else f"ranks {spans(plan.dropped)} idle"
    return f"{names}: a global batch takes {after} instead of {before} ({reasons}); {words}"
