"""How many samples each rank runs of a global batch, and in which micro-batches (Poplar, Algorithm 2; ALGORITHMS 2.3).

Pure: the same curves give the same allocation on every rank. How long an allocation takes, by stage:

- 0 and 1: the ranks synchronize once per global batch. ``wall = max_i busy_i + communication``. With accumulation
  ``shared`` all ranks run the same number of micro-steps, so that a training loop turns equally often everywhere; with
  ``own`` each has its own number.
- 2 and 3: the ranks synchronize at each micro-step, so all run the same number: ``full`` steps of m samples in all and
  a last one of the rest, ``wall = full·(max_i seconds_i[b_i] + comm) + (max_i seconds_i[r_i] + comm)``

A rank without samples in a micro-step runs one sample of weight zero, in the time of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from . import exact_search, proportional
from .exact_search import Runs
from .time_curve import Curve

__all__ = ["ACCUMULATIONS", "METHODS", "STAGES", "Allocation", "Share", "allocate"]

STAGES = (0, 1, 2, 3)
ACCUMULATIONS = ("shared", "own")
METHODS = ("exact", "uniform", "flops", "adapt")


@dataclass(frozen=True)
class Share:
    """One rank's part of a global batch: micro-batches in the order in which it runs them."""

    runs: Runs
    """(samples, how many such micro-batches), e.g. ``((8, 3), (5, 1))``. A size of 0 is a micro-step in which this rank
    runs one sample of weight zero. Empty: the rank was dropped and runs nothing (method ``adapt`` only)."""

    @property
    def samples(self) -> int:
        """Of the global batch."""
        return sum(size * count for size, count in self.runs)

    @property
    def steps(self) -> int:
        """Micro-steps, those without samples included."""
        return sum(count for _, count in self.runs)

    @property
    def micro_batch(self) -> int:
        """The largest size."""
        return max((size for size, _ in self.runs), default=0)

    @property
    def last_batch(self) -> int:
        """The size of the last micro-batch."""
        return self.runs[-1][0] if self.runs else 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """One per micro-step."""
        return tuple(size for size, count in self.runs for _ in range(count))


@dataclass(frozen=True)
class Allocation:
    """A global batch dealt to the ranks, with the time that it is predicted to take."""

    method: str
    stage: int
    accumulation: str
    global_batch_size: int
    shares: tuple[Share, ...]
    """By rank."""
    busy_seconds: tuple[float, ...]
    """Own compute per global batch, by rank."""
    communication_seconds: float
    """Per global batch."""
    wall_seconds: float
    """Per global batch: compute, waiting and communication."""

    @cached_property
    def idle_seconds(self) -> tuple[float, ...]:
        """Waiting for others per global batch, by rank; a dropped rank idles while the others compute."""
        return tuple(max(self.wall_seconds - busy - self.communication_seconds, 0.0) for busy in self.busy_seconds)

    @property
    def samples_per_second(self) -> float:
        return self.global_batch_size / self.wall_seconds

    @property
    def steps(self) -> int:
        """Micro-steps of the rank that runs most."""
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
) -> Allocation:
    """Deal a global batch to the ranks.

    Args:
        curves: one per rank; ranks that share a curve are decided together, so a thousand of a few kinds are fast.
        global_batch_size: samples per optimizer step, over all ranks.
        stage: of ZeRO, 0 to 3.
        method: ``exact`` takes the least wall time there is, and among equal ones the fewest micro-steps. ``uniform``
            (DeepSpeed) gives every rank the same, ``flops`` (Whale) in proportion to ``flops``, ``adapt`` (ADAPT) in
            proportion to measured throughput; :func:`.device_dropping.adapt` also drops devices and orders the ring.
        accumulation: ``shared``: all ranks run the same number of micro-steps, and a rank's sizes differ by one at
            most. ``own``: rank i runs ``n // b`` steps of its own b and a last one of ``n % b``; stages 0 and 1 only.
        communication_seconds: of one synchronization: per global batch in stages 0 and 1, else per micro-step.
        flops: FLOP/s by rank, for method ``flops``.

    Raises:
        ValueError: a rank that holds no sample, a batch below 1, an unknown choice, ``own`` with stage 2 or 3,
            ``flops`` missing, or not one positive number per rank.
    """
    _check(curves, global_batch_size, stage, method, accumulation, communication_seconds, flops)
    global_batch_size = int(global_batch_size)
    synchronized = stage >= 2
    if method == "exact":
        if synchronized:
            runs = exact_search.exact_synchronized(curves, global_batch_size, communication_seconds)
        elif accumulation == "own":
            runs = exact_search.exact_own(curves, global_batch_size)
        else:
            runs = exact_search.exact_shared(curves, global_batch_size)
    else:
        kind = "synchronized" if synchronized else accumulation
        runs = proportional.METHODS[method](curves, global_batch_size, kind, flops)
    return evaluate(
        curves, [Share(each) for each in runs], stage, method=method, accumulation=accumulation,
        communication_seconds=communication_seconds,
    )  # fmt: skip


def evaluate(
    curves: Sequence[Curve],
    shares: Sequence[Share],
    stage: int,
    *,
    method: str,
    accumulation: str = "shared",
    communication_seconds: float = 0.0,
) -> Allocation:
    """The allocation of given shares: what it takes by the curves.

    Raises:
        ValueError: a micro-batch that a rank does not hold; in stages 2 and 3, ranks whose micro-steps do not match.
    """
    known: dict[tuple[int, Runs], float] = {}
    for rank, (curve, share) in enumerate(zip(curves, shares, strict=True)):
        if (id(curve), share.runs) in known:
            continue
        if share.micro_batch > curve.max_batch:
            raise ValueError(f"rank {rank} holds {curve.max_batch} samples, not a micro-batch of {share.micro_batch}")
        known[id(curve), share.runs] = math.fsum(count * float(curve.seconds[size]) for size, count in share.runs)
    busy = tuple(known[id(curve), share.runs] for curve, share in zip(curves, shares, strict=True))
    if stage < 2:
        communication, compute = communication_seconds, max(busy)
    else:
        # Kinds, not ranks, one after the other: there are few different runs.
        different = {(id(curve), share.runs): curve for curve, share in zip(curves, shares, strict=True) if share.runs}
        counts = {tuple(count for _, count in runs) for _, runs in different}
        if len(counts) != 1:
            raise ValueError(f"in stage {stage} all ranks run the same micro-steps, not {sorted(counts)}")
        (repeats,) = counts
        longest = [
            max(float(curve.seconds[runs[step][0]]) for (_, runs), curve in different.items())
            for step in range(len(repeats))
        ]
        compute = math.fsum(count * seconds for count, seconds in zip(repeats, longest, strict=True))
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
) -> None:
    if len(curves) == 0:
        raise ValueError("no curves: give one per rank")
    if isinstance(global_batch_size, bool) or global_batch_size != int(global_batch_size) or global_batch_size < 1:
        raise ValueError(f"global_batch_size={global_batch_size} must be a whole number of samples, at least 1")
    if stage not in STAGES:
        raise ValueError(f"stage={stage!r} does not exist; ZeRO's stages are {', '.join(map(str, STAGES))}")
    for name, value, valid in (("method", method, METHODS), ("accumulation", accumulation, ACCUMULATIONS)):
        if value not in valid:
            raise ValueError(f"unknown {name} {value!r}; valid are {', '.join(valid)}")
    if accumulation == "own" and stage >= 2:
        raise ValueError(
            f"accumulation='own' with stage={stage}: from stage 2 on the ranks synchronize at every micro-step and "
            "must run equally many; use accumulation='shared', or stage 0 or 1"
        )
    if not (communication_seconds >= 0 and math.isfinite(communication_seconds)):
        raise ValueError(f"communication_seconds={communication_seconds} must be a number of seconds, at least 0")
    for rank, curve in enumerate(curves):
        if curve.max_batch < 1:
            raise ValueError(
                f"rank {rank} cannot hold one sample in stage {stage}; "
                + ("raise the stage, which shards more of the state, " if stage < 3 else "free memory on that device ")
                + "or leave that rank out"
            )
    if method == "flops":
        if flops is None:
            raise ValueError("method='flops' needs flops, the FLOP/s of every rank; give them, or use another method")
        if len(flops) != len(curves):
            raise ValueError(f"{len(flops)} flops for {len(curves)} ranks: give one per rank")
        for rank, number in enumerate(flops):
            if number is None or not (number > 0 and math.isfinite(number)):
                raise ValueError(f"flops of rank {rank} are {number}; give a positive number of FLOP/s")
