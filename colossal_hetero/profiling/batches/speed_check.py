"""Check, in a fraction of a second, whether a profile of an earlier run still describes this device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...accelerator import get_accelerator
from ...planner.batches.batch_profile import DeviceProfile
from ..aborted_step import abort_step
from ..local_collectives import local_collectives
from ..memory import is_out_of_memory, memory_limit, recover
from ..preserved_state import preserved_state
from ..training_step import TrialRun
from .device_profiler import STEADY_SECONDS

__all__ = ["MAX_CHANGE", "MAX_DIFFERENCE", "SpeedNow", "changes", "size_to_check", "speed_now"]

MAX_CHANGE = 1.25
"""Largest factor between a time now and in the profile, in both directions, with which the profile is still used."""

MAX_DIFFERENCE = 1.2
"""Largest ratio of the ranks' factors: a change of all ranks alike does not change the best division, but this does.
On a shared machine, short measurements of equal devices differ by up to 12 %; what remains is found in training."""

MAX_RUNS = 30
"""Largest number of passes of the check."""


def size_to_check(device: DeviceProfile) -> int:
    """The largest timed size of which some passes take no longer than the check; else the smallest timed size."""
    short = [point.batch for point in device.points if point.seconds <= STEADY_SECONDS / 2]
    return max(short, default=device.points[0].batch)


@dataclass(frozen=True)
class SpeedNow:
    """A rank's time now and in the profile."""

    batch: int
    """Samples of the micro-batch that ran."""
    seconds: float
    expected_seconds: float
    """The time in the profile."""


def changes(ranks: Sequence[SpeedNow | str], replica_of: Sequence[int]) -> str | None:
    """What differs from the profile, in words, from :func:`speed_now` of all ranks; None if it is still right.

    ``replica_of`` is the index of the replica that each rank belongs to. The profile of a replica has the times of its
    slowest rank, so the others may be faster.
    """
    found = [f"rank {rank}: {words}" for rank, words in enumerate(ranks) if isinstance(words, str)]
    if found:
        return "; ".join(found)
    speeds = [each for each in ranks if isinstance(each, SpeedNow)]
    by_replica: dict[int, float] = {}
    for each, replica in zip(speeds, replica_of, strict=True):
        by_replica[replica] = max(each.seconds / each.expected_seconds, by_replica.get(replica, 0.0))
    factors = by_replica.values()
    if max(factors) <= MAX_CHANGE and min(factors) >= 1 / MAX_CHANGE and max(factors) <= MAX_DIFFERENCE * min(factors):
        return None
    return "; ".join(
        f"rank {rank}: a micro-batch of {each.batch} takes {each.seconds:.3g} s, but took {each.expected_seconds:.3g} s"
        for rank, each in enumerate(speeds)
    )


def speed_now(
    device: DeviceProfile, trial: TrialRun, synchronize: Callable[[bool], None], stage: int
) -> SpeedNow | str:
    """The speed of this rank, whose profile is ``device``; or why its memory is too small now, in words.

    The passes run without communication, and leave no trace. ``synchronize`` is that of
    :func:`.rank_profiler.profile_ranks`.
    """
    limit = memory_limit(get_accelerator().get_current_device())
    needed = device.state_bytes + device.max_batch * device.sample_bytes
    if limit.bytes < needed:
        return f"{limit.bytes / 2**30:.2f} GiB of memory can be used, but {needed / 2**30:.2f} GiB are needed"
    batch = size_to_check(device)
    expected = next(point.seconds for point in device.points if point.batch == batch)
    try:
        with preserved_state(trial.model, trial.optimizer):
            synchronize(stage != 0)
            with local_collectives(trial.model):
                seconds = _seconds(trial, batch)
            trial.optimizer.zero_grad()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        recover(error)
        abort_step(trial.model, trial.optimizer)
        return f"a micro-batch of {batch} samples runs out of memory"
    finally:
        trial.release()
        synchronize(True)
    return SpeedNow(batch, seconds, expected)


def _seconds(trial: TrialRun, batch: int) -> float:
    """Mean time of passes, repeated as long as it takes to see a throttled device stop."""
    trial(batch)  # prepares libraries
    times: list[float] = []
    begin = time.perf_counter()
    while not times or (time.perf_counter() - begin < STEADY_SECONDS and len(times) < MAX_RUNS):
        times.append(trial(batch))
    return sum(times) / len(times)
