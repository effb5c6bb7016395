"""Division of a global batch into micro-batches of the ranks (Poplar, Algorithm 2; docs/algorithms.md, 2.3).

The same curves give the same allocation on every rank. Beyond the formulas there: the last micro-step of stages 2 and 3
has the remainder of the samples, and in stages 1 to 3 the wall time grows by the longest optimizer step. A rank without
samples in a micro-step runs ``min_batch`` samples of weight zero.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .exact_search import (
    TOLERANCE,
    Runs,
    exact_per_rank,
    exact_shared,
    exact_synchronized,
    split_evenly,
    split_per_rank,
)
from .time_curve import Curve

ACCUMULATIONS = ("shared", "per_rank")
"""Numbers of micro-steps per global batch: the same on all ranks, or each rank's own."""
LEAST_GAIN = 0.02
"""Share of the wall time that more micro-batches must save where a loop runs them: it has a turn for each of them, and
timed curves are not more exact than that."""
METHODS = ("exact", "uniform", "flops", "adapt", "poplar")


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
    busy_seconds: tuple[float, ...]  # each rank's compute time per global batch, with its optimizer's step, by rank
    communication_seconds: float
    wall_seconds: float  # time per global batch: compute, waiting and communication

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
    least_gain: float = TOLERANCE,
) -> Allocation:
    """Divide a global batch over the ranks.

    Args:
        curves: by rank. Ranks that share a curve object are treated together, so 1,000 ranks of a few kinds are fast.
        global_batch_size: samples per optimizer step, over all ranks.
        stage: stage of ZeRO, 0 to 3.
        method: ``exact`` has the smallest possible wall time and, among equal ones, the fewest micro-steps. ``uniform``
            (DeepSpeed) gives every rank the same number of samples, ``flops`` (Whale) divides in proportion to
            ``flops``, ``adapt`` (ADAPT) in proportion to measured throughput; :func:`.adapt.adapt` also drops
            devices. ``poplar`` is Algorithm 2 of that paper; its stages 0 and 1 need ``per_rank``.
        accumulation: with ``shared`` all ranks run the same number of micro-steps, and the micro-batches of a rank
            differ by at most one sample. With ``per_rank`` rank i runs ``n_i // b_i`` micro-batches of ``b_i`` samples
            and a last one of ``n_i % b_i``; only for stages 0 and 1.
        communication_seconds: time of one synchronization: once per global batch in stages 0 and 1, once per micro-step
            in stages 2 and 3.
        flops: FLOP/s by rank, for method ``flops``.
        step_seconds: time of the optimizer's step by rank; None: not counted.
        least_gain: share of the wall time that method ``exact`` must save with more micro-steps; not ``per_rank``.

    Raises:
        ValueError: a rank holds no sample, or an argument is out of its range, missing, or not one value per rank.
    """
    _check(curves, global_batch_size, stage, method, accumulation, communication_seconds, flops, step_seconds)
    samples, fixed_seconds = int(global_batch_size), step_seconds if stage == 0 else None
    if method == "poplar":
        runs = (
            _poplar_once(curves, samples) if stage < 2 else _poplar_synchronized(curves, samples, communication_seconds)
        )
    elif method != "exact":
        runs = _in_proportion(curves, samples, "every step" if stage >= 2 else accumulation, method, flops)
    elif stage >= 2:
        runs = exact_synchronized(curves, samples, communication_seconds, least_gain)
    elif accumulation == "per_rank":
        runs = exact_per_rank(curves, samples, fixed_seconds)
    else:
        runs = exact_shared(curves, samples, fixed_seconds, least_gain)
    return evaluate(
        curves, [Share(each) for each in runs], stage, method=method, accumulation=accumulation,
        communication_seconds=communication_seconds, step_seconds=step_seconds,
    )  # fmt: skip


def largest_remainders(weights: Sequence[float] | NDArray[np.float64], samples: int) -> NDArray[np.int64]:
    """Whole numbers in proportion to ``weights`` that sum to ``samples``, by the largest-remainder method."""
    shares = np.asarray(weights, dtype=np.float64)
    exact = shares / shares.sum() * samples
    # The small number keeps a whole number whole if it was rounded to slightly less.
    parts: NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    first = np.argsort(-(exact - parts), kind="stable")
    parts[first[: samples - int(parts.sum())]] += 1
    return parts


def _in_proportion(
    curves: Sequence[Curve], samples: int, form: str, method: str, flops: Sequence[float] | None
) -> list[Runs]:
    """Each rank's micro-batches by a rule, the largest that fit. In form ``every step`` (stages 2 and 3), each
    micro-step is divided in proportion. In the others, all samples are, and each rank's part into the fewest
    micro-steps that fit on all ranks: ``shared`` evenly, ``per_rank`` with a smaller last one."""
    largest = np.array([curve.max_batch for curve in curves])
    min_batch = max(curve.min_batch for curve in curves)
    if method == "uniform":  # every rank runs micro-batches that all hold
        weights, largest = np.ones(len(curves)), np.full(len(curves), largest.min())
    else:
        peaks = {key: curve.peak_speed for key, curve in {id(curve): curve for curve in curves}.items()}
        weights = np.array(flops if method == "flops" else [peaks[id(curve)] for curve in curves], dtype=np.float64)
    if form == "every step":
        # Each rank gets at least its proportion rounded down, which limits the samples of a micro-step.
        size = int(min(samples, math.ceil(((largest + 1) * (weights.sum() / weights)).min())))
        while True:
            full, left = divmod(samples, size)
            parts = [(_parts(weights, n, min_batch), count) for n, count in ((size, full), (left, 1)) if n]
            if size <= min_batch or all((step <= largest).all() and step.sum() >= min_batch for step, _ in parts):
                return [tuple((int(step[rank]), count) for step, count in parts) for rank in range(len(curves))]
            size -= 1
    by_rank = largest_remainders(weights, samples)
    steps = int(np.ceil(by_rank / largest).max())
    if form == "per_rank":
        return [split_per_rank(int(count), max(math.ceil(count / steps), 1)) for count in by_rank]
    by_rank = _parts(weights, samples, steps * min_batch if min_batch > 1 else 1)
    if (by_rank > steps * largest).any():
        raise ValueError(
            f"{samples} samples cannot be divided in proportion, because the model trains with at least {min_batch} "
            "samples; use method='exact', or another global batch size"
        )
    return [split_evenly(int(count), steps) for count in by_rank]


# Poplar's Algorithm 2 as printed. Beyond the print: what remains in stages 2 and 3 is a smaller last micro-step.


def _poplar_once(curves: Sequence[Curve], samples: int) -> list[Runs]:
    """Lines 2 to 16 (docs/algorithms.md, 2.3), for one synchronization per global batch; micro-batches have the size of
    the peak."""
    speeds = np.array([curve.peak_speed for curve in curves])
    parts = np.floor(samples / speeds.sum() * speeds + 1e-9).astype(np.int64)
    for _ in range(samples - int(parts.sum())):
        parts[np.argmin(parts / speeds)] += 1
    peaks = [int((np.arange(len(curve.seconds)) / curve.seconds).argmax()) for curve in curves]
    return [split_per_rank(int(part), peak) for part, peak in zip(parts, peaks, strict=True)]


def _poplar_synchronized(curves: Sequence[Curve], samples: int, communication_seconds: float) -> list[Runs]:
    """Lines 17 to 30: of all times t of a micro-step, in which each rank computes the largest micro-batch that takes no
    longer, the one with the least ``(t + t_comm)·gas``, ``gas = ⌈gbs / Σ b_i⌉``."""
    kinds = {id(curve): curve for curve in curves}
    best, least = np.zeros(0, dtype=np.int64), math.inf
    for seconds in np.unique(np.concatenate([curve.seconds[curve.min_batch :] for curve in kinds.values()])):
        fitting = {key: int(np.searchsorted(curve.seconds, seconds, "right")) - 1 for key, curve in kinds.items()}
        sizes = np.array([size if size >= curves[0].min_batch else 0 for size in (fitting[id(c)] for c in curves)])
        if sizes.any() and (wall := (seconds + communication_seconds) * math.ceil(samples / sizes.sum())) < least:
            best, least = sizes, wall
    full, rest = divmod(samples, int(best.sum()))
    last = largest_remainders(best.astype(np.float64), rest)
    steps = [(best, full), (last, 1 if rest else 0)]
    return [tuple((int(step[rank]), count) for step, count in steps if count) for rank in range(len(curves))]


def _parts(weights: NDArray[np.float64], samples: int, floor: int) -> NDArray[np.int64]:
    """``samples`` in proportion to ``weights``; if a part is below ``floor``, fewer ranks get at least so many."""
    parts = largest_remainders(weights, samples)
    if floor > 1 and parts.min() < floor <= samples:
        used = np.argsort(-parts, kind="stable")[: samples // floor]
        parts[:] = 0
        parts[used] = floor + largest_remainders(weights[used], samples - floor * len(used))
    return parts


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
    # By curve and runs instead of by rank, because there are few different ones.
    kinds = {
        (id(curve), share.runs): (rank, curve) for rank, (curve, share) in enumerate(zip(curves, shares, strict=True))
    }
    seconds = {}
    for (key, runs), (rank, curve) in kinds.items():
        sizes = [size for size, _ in runs if size > 0] or [curve.min_batch]
        if max(sizes) > curve.max_batch and runs:
            raise ValueError(f"rank {rank} holds at most {curve.max_batch} samples, not a micro-batch of {max(sizes)}")
        if min(sizes) < curve.min_batch:
            raise ValueError(
                f"rank {rank} has a micro-batch of {min(sizes)}, but the model trains with at least {curve.min_batch} "
                "samples; use method='exact', or another global batch size"
            )
        seconds[key, runs] = math.fsum(count * float(curve.seconds[size]) for size, count in runs)
    passes = [seconds[id(curve), share.runs] for curve, share in zip(curves, shares, strict=True)]
    steps = [0.0] * len(curves) if step_seconds is None else step_seconds
    busy = tuple(compute + step for compute, step in zip(passes, steps, strict=True))
    compute, communication = max(busy) if stage == 0 else max(passes) + max(steps), communication_seconds
    if stage >= 2:
        working = [(curve, runs) for (_, runs), (_, curve) in kinds.items() if runs]
        counts = {tuple(count for _, count in runs) for _, runs in working}
        if len(counts) != 1:
            raise ValueError(
                f"in stage {stage} all ranks must run the same number of micro-steps, not {sorted(counts)}"
            )
        (repeats,) = counts
        longest = (max(float(curve.seconds[runs[i][0]]) for curve, runs in working) for i in range(len(repeats)))
        compute = math.fsum(count * each for count, each in zip(repeats, longest, strict=True)) + max(steps)
        communication *= sum(repeats)
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
    if stage not in range(4):
        raise ValueError(f"stage={stage!r} does not exist; the stages of ZeRO are 0, 1, 2, 3")
    for name, value, valid in (("method", method, METHODS), ("accumulation", accumulation, ACCUMULATIONS)):
        if value not in valid:
            raise ValueError(f"unknown {name} {value!r}; valid are {', '.join(valid)}")
    if not (communication_seconds >= 0 and math.isfinite(communication_seconds)):
        raise ValueError(f"communication_seconds={communication_seconds} must be finite and at least 0")
    if method == "flops" and flops is None:
        raise ValueError("method='flops' needs flops, the FLOP/s of every rank; give them, or use another method")
    _check_numbers(len(curves), "step_seconds", step_seconds)
    _check_numbers(len(curves), "flops", flops if method == "flops" else None)
    for rank, curve in enumerate(curves):
        if curve.max_batch < 1:
            remedy = "use a higher stage, which shards more of the state," if stage < 3 else "free memory on its device"
            raise ValueError(f"rank {rank} cannot hold one sample in stage {stage}; {remedy} or leave that rank out")
    min_batch = max(curve.min_batch for curve in curves)
    if global_batch_size < min_batch:
        raise ValueError(
            f"a global batch of {global_batch_size} cannot be run, because the model trains with at least {min_batch} "
            "samples (it has a batch normalization); use drop_last=True if it is the last one of an epoch, or another "
            "global batch size"
        )
    if method == "poplar" and accumulation == "shared" and stage < 2:
        raise ValueError(
            "method='poplar' gives each rank its own number of micro-steps in stages 0 and 1; use "
            "accumulation='per_rank', or stage 2 or 3"
        )
    if accumulation == "per_rank" and stage >= 2:
        raise ValueError(
            f"accumulation='per_rank' is not possible with stage={stage}: in stages 2 and 3 the ranks synchronize at "
            "every micro-step, so all must run the same number of micro-steps; use accumulation='shared', or stage 0 "
            "or 1"
        )
    if accumulation == "per_rank" and min_batch > 1:
        raise ValueError(
            f"accumulation='per_rank' is not possible with a model that trains with at least {min_batch} samples (it "
            "has a batch normalization), because a rank's last micro-batch may be smaller; use accumulation='shared'"
        )


def _check_numbers(ranks: int, name: str, values: Sequence[float] | None) -> None:
    if values is not None and len(values) != ranks:
        raise ValueError(f"{name} has {len(values)} values for {ranks} ranks: give one per rank")
    for rank, number in enumerate(values or ()):
        if number is None or not math.isfinite(number) or number < 0 or (name == "flops" and number == 0):
            must = "a positive number of FLOP/s" if name == "flops" else "finite and at least 0"
            raise ValueError(f"{name}[{rank}]={number} must be {must}")
