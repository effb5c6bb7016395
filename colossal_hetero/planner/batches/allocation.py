"""Division of a global batch into micro-batches of the ranks (Poplar, Algorithm 2; docs/algorithms.md, 2.3).

The same curves give the same allocation on every rank. The predicted time depends on the ZeRO stage:

- Stages 0 and 1: the ranks synchronize once per global batch, ``wall = max_i busy_i + communication``.
- Stages 2 and 3: the ranks synchronize at every micro-step: ``full`` ones of m samples over all ranks and a last one
  with the remainder, ``wall = full·(max_i seconds_i[b_i] + comm) + (max_i seconds_i[r_i] + comm)``.

A rank's optimizer step takes a fixed time. In stage 0 no collective follows it, so it is a part of ``busy_i``. In
stages 1 to 3 the ranks then synchronize the parameters, so the wall time grows by the longest step. A rank without
samples in a micro-step runs ``min_batch`` samples of weight zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from . import exact_search
from .exact_search import Runs, split_evenly, split_per_rank
from .time_curve import Curve

__all__ = ["ACCUMULATIONS", "METHODS", "RULES", "STAGES", "Allocation", "Share", "allocate", "largest_remainders"]


# Proportional --------------------------------------------------------------------------------------------------------
# Divide in proportion to weights, in the largest micro-batches that fit: ``uniform`` is the rule of DeepSpeed (equal
# weights), ``flops`` that of Whale (FLOP/s), ``adapt`` that of ADAPT (measured throughput).


def largest_remainders(weights: Sequence[float] | NDArray[np.float64], samples: int) -> NDArray[np.int64]:
    """Whole numbers in proportion to ``weights`` that sum to ``samples``, by the largest-remainder method."""
    shares = np.asarray(weights, dtype=np.float64)
    exact = shares / shares.sum() * samples
    # The small number keeps a whole number whole if it was rounded to slightly less.
    parts: NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    first = np.argsort(-(exact - parts), kind="stable")
    parts[first[: samples - int(parts.sum())]] += 1
    return parts


def _in_proportion(curves: Sequence[Curve], samples: int, kind: str, weights: NDArray[np.float64]) -> list[Runs]:
    """Each rank's micro-batches in proportion to ``weights``; ``kind`` is ``synchronized`` in stages 2 and 3.

    ``synchronized`` divides every micro-step, with the largest that fit. The others divide all samples, and each rank's
    part into the fewest micro-steps that fit on all ranks: ``shared`` evenly, ``per_rank`` with a smaller last one.
    """
    largest = np.array([curve.max_batch for curve in curves])
    min_batch = max(curve.min_batch for curve in curves)
    if kind == "synchronized":
        # Each rank gets at least its proportion rounded down, which limits the samples of a micro-step.
        bound = ((largest + 1) * (weights.sum() / weights)).min()
        size = int(min(samples, math.ceil(bound)))
        while True:
            full, left = divmod(samples, size)
            parts = [(largest_remainders(weights, size), full)]
            parts += [(largest_remainders(weights, left), 1)] if left else []
            if min_batch > 1:
                parts = [(_without_small_parts(step, min_batch), count) for step, count in parts]
            if size <= min_batch or all((step <= largest).all() and step.sum() >= min_batch for step, _ in parts):
                return [tuple((int(step[rank]), count) for step, count in parts) for rank in range(len(curves))]
            size -= 1
    by_rank = largest_remainders(weights, samples)
    steps = int(np.ceil(by_rank / largest).max())
    if kind == "shared":
        if min_batch > 1:
            by_rank = _without_small_parts(by_rank, steps * min_batch)
            if (by_rank > steps * largest).any():
                raise ValueError(
                    f"{samples} samples cannot be divided in proportion, because the model trains with at least "
                    f"{min_batch} samples; use method='exact', or another global batch size"
                )
        return [split_evenly(int(count), steps) for count in by_rank]
    return [split_per_rank(int(count), max(math.ceil(count / steps), 1)) for count in by_rank]


def _without_small_parts(parts: NDArray[np.int64], floor: int) -> NDArray[np.int64]:
    """``parts`` with the same sum, each 0 or at least ``floor`` if the sum permits; the largest ones give."""
    if parts.min() >= floor or parts.sum() < floor:
        return parts
    parts = parts.copy()
    used = np.argsort(-parts, kind="stable")[: int(parts.sum()) // floor]
    total, kept = int(parts.sum()), parts[used]
    parts[:] = 0
    kept = np.maximum(kept, floor)
    for _ in range(int(kept.sum()) - total):
        kept[kept.argmax()] -= 1
    for _ in range(total - int(kept.sum())):
        kept[kept.argmin()] += 1
    parts[used] = kept
    return parts


def _uniform(curves: Sequence[Curve], samples: int, kind: str, flops: Sequence[float] | None) -> list[Runs]:
    """The same number of samples on every rank, or one more, in micro-batches that every rank holds."""
    largest = min(curve.max_batch for curve in curves)
    if kind != "per_rank":
        return _in_proportion([curve.limited(largest) for curve in curves], samples, kind, np.ones(len(curves)))
    by_rank = largest_remainders(np.ones(len(curves)), samples)
    steps = math.ceil(by_rank.max() / largest)
    size = math.ceil(by_rank.max() / steps)
    return [split_per_rank(int(count), size) for count in by_rank]


def _flops(curves: Sequence[Curve], samples: int, kind: str, flops: Sequence[float] | None) -> list[Runs]:
    assert flops is not None
    return _in_proportion(curves, samples, kind, np.asarray(flops, dtype=np.float64))


def _adapt(curves: Sequence[Curve], samples: int, kind: str, flops: Sequence[float] | None) -> list[Runs]:
    speeds = {id(curve): curve.peak_speed for curve in curves}
    return _in_proportion(curves, samples, kind, np.array([speeds[id(curve)] for curve in curves]))


RULES: dict[str, Callable[[Sequence[Curve], int, str, Sequence[float] | None], list[Runs]]] = {
    "uniform": _uniform,
    "flops": _flops,
    "adapt": _adapt,
}

STAGES = (0, 1, 2, 3)
ACCUMULATIONS = ("shared", "per_rank")
"""Numbers of micro-steps per global batch: the same on all ranks, or each rank's own."""
METHODS = ("exact", "uniform", "flops", "adapt")


@dataclass(frozen=True)
class Share:
    """One rank's part of a global batch."""

    runs: Runs
    """Pairs (samples of a micro-batch, number of such micro-batches) in running order, e.g. ``((8, 3), (5, 1))``. In a
    micro-step of size 0 the rank runs samples of weight zero. ``()``: dropped by method ``adapt``."""

    @property
    def samples(self) -> int:
        return sum(size * count for size, count in self.runs)

    @property
    def steps(self) -> int:
        """Number of micro-steps, including those without samples."""
        return sum(count for _, count in self.runs)

    @property
    def micro_batch(self) -> int:
        return max((size for size, _ in self.runs), default=0)

    @property
    def last_batch(self) -> int:
        return self.runs[-1][0] if self.runs else 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for size, count in self.runs for _ in range(count))


@dataclass(frozen=True)
class Allocation:
    """A global batch divided over the ranks, with the predicted time."""

    method: str
    stage: int
    accumulation: str
    global_batch_size: int
    shares: tuple[Share, ...]
    busy_seconds: tuple[float, ...]
    """Each rank's compute time per global batch, with its optimizer's step, by rank."""
    communication_seconds: float
    wall_seconds: float
    """Time per global batch: compute, waiting and communication."""

    @cached_property
    def idle_seconds(self) -> tuple[float, ...]:
        """Time per global batch that each rank waits for others, by rank; a dropped rank waits while others compute."""
        return tuple(max(self.wall_seconds - busy - self.communication_seconds, 0.0) for busy in self.busy_seconds)

    @property
    def samples_per_second(self) -> float:
        return self.global_batch_size / self.wall_seconds

    @property
    def steps(self) -> int:
        return max(share.steps for share in self.shares)


def allocate(
    curves: Sequence[Curve],
    global_batch_size: int,
    stage: int,
    *,
    method: str = "exact",
    accumulation: str = "shared",
    communication_seconds: float = 0.0,
    flops: Sequence[float] | None = None,
    step_seconds: Sequence[float] | None = None,
) -> Allocation:
    """Divide a global batch over the ranks.

    Args:
        curves: by rank. Ranks that share a curve object are treated together, so 1,000 ranks of a few kinds are fast.
        global_batch_size: samples per optimizer step, over all ranks.
        stage: stage of ZeRO, 0 to 3.
        method: ``exact`` has the smallest possible wall time and, among equal ones, the fewest micro-steps. ``uniform``
            (DeepSpeed) gives every rank the same number of samples, ``flops`` (Whale) divides in proportion to
            ``flops``, ``adapt`` (ADAPT) in proportion to measured throughput; :func:`.comparison.adapt` also drops
            devices.
        accumulation: with ``shared`` all ranks run the same number of micro-steps, and the micro-batches of a rank
            differ by at most one sample. With ``per_rank`` rank i runs ``n_i // b_i`` micro-batches of ``b_i`` samples
            and a last one of ``n_i % b_i``; only for stages 0 and 1.
        communication_seconds: time of one synchronization: once per global batch in stages 0 and 1, once per micro-step
            in stages 2 and 3.
        flops: FLOP/s by rank, for method ``flops``.
        step_seconds: time of the optimizer's step by rank; None: not counted.

    Raises:
        ValueError: a rank holds no sample, or an argument is out of its range, missing, or not one value per rank.
    """
    _check(curves, global_batch_size, stage, method, accumulation, communication_seconds, flops, step_seconds)
    global_batch_size = int(global_batch_size)
    synchronized = stage >= 2
    fixed_seconds = step_seconds if stage == 0 else None
    if method == "exact":
        if synchronized:
            runs = exact_search.exact_synchronized(curves, global_batch_size, communication_seconds)
        elif accumulation == "per_rank":
            runs = exact_search.exact_per_rank(curves, global_batch_size, fixed_seconds)
        else:
            runs = exact_search.exact_shared(curves, global_batch_size, fixed_seconds)
    else:
        kind = "synchronized" if synchronized else accumulation
        runs = RULES[method](curves, global_batch_size, kind, flops)
    return evaluate(
        curves, [Share(each) for each in runs], stage, method=method, accumulation=accumulation,
        communication_seconds=communication_seconds, step_seconds=step_seconds,
    )  # fmt: skip


def evaluate(
    curves: Sequence[Curve],
    shares: Sequence[Share],
    stage: int,
    *,
    method: str,
    accumulation: str = "shared",
    communication_seconds: float = 0.0,
    step_seconds: Sequence[float] | None = None,
) -> Allocation:
    """The allocation with the given shares, its times read from the curves."""
    known: dict[tuple[int, Runs], float] = {}
    for rank, (curve, share) in enumerate(zip(curves, shares, strict=True)):
        if (id(curve), share.runs) in known:
            continue
        if share.micro_batch > curve.max_batch:
            raise ValueError(
                f"rank {rank} holds at most {curve.max_batch} samples, not a micro-batch of {share.micro_batch}"
            )
        smallest = min((size for size, _ in share.runs if size > 0), default=curve.min_batch)
        if smallest < curve.min_batch:
            raise ValueError(
                f"rank {rank} has a micro-batch of {smallest}, but the model trains with at least {curve.min_batch} "
                "samples; use method='exact', or another global batch size"
            )
        known[id(curve), share.runs] = math.fsum(count * float(curve.seconds[size]) for size, count in share.runs)
    compute_by_rank = [known[id(curve), share.runs] for curve, share in zip(curves, shares, strict=True)]
    steps = [0.0] * len(curves) if step_seconds is None else step_seconds
    busy = tuple(compute + step for compute, step in zip(compute_by_rank, steps, strict=True))
    if stage == 0:
        communication, compute = communication_seconds, max(busy)
    elif stage == 1:
        communication, compute = communication_seconds, max(compute_by_rank) + max(steps)
    else:
        # Over kinds of device instead of ranks, because there are few different runs.
        different = {(id(curve), share.runs): curve for curve, share in zip(curves, shares, strict=True) if share.runs}
        counts = {tuple(count for _, count in runs) for _, runs in different}
        if len(counts) != 1:
            raise ValueError(
                f"in stage {stage} all ranks must run the same number of micro-steps, not {sorted(counts)}"
            )
        (repeats,) = counts
        longest = [
            max(float(curve.seconds[runs[step][0]]) for (_, runs), curve in different.items())
            for step in range(len(repeats))
        ]
        compute = math.fsum(count * seconds for count, seconds in zip(repeats, longest, strict=True)) + max(steps)
        communication = sum(repeats) * communication_seconds
    return Allocation(
        method=method,
        stage=stage,
        accumulation=accumulation,
        global_batch_size=sum(share.samples for share in shares),
        shares=tuple(shares),
        busy_seconds=busy,
        communication_seconds=communication,
        wall_seconds=compute + communication,
    )


def _check(
    curves: Sequence[Curve],
    global_batch_size: int,
    stage: int,
    method: str,
    accumulation: str,
    communication_seconds: float,
    flops: Sequence[float] | None,
    step_seconds: Sequence[float] | None,
) -> None:
    if len(curves) == 0:
        raise ValueError("no curves: give one per rank")
    if isinstance(global_batch_size, bool) or global_batch_size != int(global_batch_size) or global_batch_size < 1:
        raise ValueError(f"global_batch_size={global_batch_size} must be a whole number of samples, at least 1")
    if stage not in STAGES:
        raise ValueError(f"stage={stage!r} does not exist; the stages of ZeRO are {', '.join(map(str, STAGES))}")
    for name, value, valid in (("method", method, METHODS), ("accumulation", accumulation, ACCUMULATIONS)):
        if value not in valid:
            raise ValueError(f"unknown {name} {value!r}; valid are {', '.join(valid)}")
    if accumulation == "per_rank" and stage >= 2:
        raise ValueError(
            f"accumulation='per_rank' is not possible with stage={stage}: in stages 2 and 3 the ranks synchronize at "
            "every micro-step, so all must run the same number of micro-steps; use accumulation='shared', or stage 0 "
            "or 1"
        )
    min_batch = max(curve.min_batch for curve in curves)
    if global_batch_size < min_batch:
        raise ValueError(
            f"a global batch of {global_batch_size} cannot be run, because the model trains with at least {min_batch} "
            "samples (it has a batch normalization); use drop_last=True if it is the last one of an epoch, or another "
            "global batch size"
        )
    if accumulation == "per_rank" and min_batch > 1:
        raise ValueError(
            f"accumulation='per_rank' is not possible with a model that trains with at least {min_batch} samples (it "
            "has a batch normalization), because a rank's last micro-batch may be smaller; use accumulation='shared'"
        )
    if not (communication_seconds >= 0 and math.isfinite(communication_seconds)):
        raise ValueError(f"communication_seconds={communication_seconds} must be finite and at least 0")
    if step_seconds is not None:
        if len(step_seconds) != len(curves):
            raise ValueError(f"step_seconds has {len(step_seconds)} values for {len(curves)} ranks: give one per rank")
        for rank, seconds in enumerate(step_seconds):
            if not (seconds >= 0 and math.isfinite(seconds)):
                raise ValueError(f"step_seconds[{rank}]={seconds} must be finite and at least 0")
    for rank, curve in enumerate(curves):
        if curve.max_batch < 1:
            raise ValueError(
                f"rank {rank} cannot hold one sample in stage {stage}; "
                + (
                    "use a higher stage, which shards more of the state, "
                    if stage < 3
                    else "free memory on its device "
                )
                + "or leave that rank out"
            )
    if method == "flops":
        if flops is None:
            raise ValueError("method='flops' needs flops, the FLOP/s of every rank; give them, or use another method")
        if len(flops) != len(curves):
            raise ValueError(f"flops has {len(flops)} values for {len(curves)} ranks: give one per rank")
        for rank, number in enumerate(flops):
            if number is None or not (number > 0 and math.isfinite(number)):
                raise ValueError(f"flops[{rank}]={number} must be a positive number of FLOP/s")
