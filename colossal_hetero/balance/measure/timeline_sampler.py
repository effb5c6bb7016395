"""The segments of a few iterations, which a rank keeps for timelines."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["SAMPLE_EVERY", "Kind", "RankSegments", "SampledIterations", "Segment", "TimelineSampler"]

Kind = Literal["matmul", "block", "other", "communication", "waiting"]


SAMPLE_EVERY = 8
"""One of this many iterations is kept with its segments; later in a run, one of this many that are measured."""


class Segment(NamedTuple):
    """A part of a rank's iteration that was spent on one kind of work."""

    kind: Kind
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class RankSegments:
    """One iteration as measured by one rank."""

    iteration: int
    segments: tuple[Segment, ...]
    """Segments in order; waiting is not separated from communication, which takes the times of all ranks."""
    time_base: str
    """If it is equal on two ranks and not empty, their seconds count from the same moment."""


@dataclass(frozen=True)
class SampledIterations:
    """The iterations that a rank kept with their segments."""

    iterations: tuple[RankSegments, ...]
    first_change: int | None
    """The iteration at the end of which the rank's group first changed its plan."""


class TimelineSampler:
    """Keeps the segments of a few iterations: of the last one that is certainly unbalanced, and of the latest ones.

    The choice depends only on the iteration's number, so that all ranks keep the same iterations.
    """

    def __init__(self, warmup_iterations: int, patience: int, measured_every: int = 1) -> None:
        self._every = SAMPLE_EVERY * measured_every
        # Speeds are judged after `warmup + patience` iterations. The flag raised then is read, and the plan changed, at
        # the end of the following iteration, which has this number.
        self._unbalanced = warmup_iterations + patience
        self._early: RankSegments | None = None
        # Two, because the clocks of ranks may be an iteration apart.
        self._late: deque[RankSegments] = deque(maxlen=2)
        self._first_change: int | None = None

    def wants(self, iteration: int) -> bool:
        """Whether the clock should keep the segments of this iteration."""
        # Short runs have a timeline after balancing, too.
        every = SAMPLE_EVERY if iteration < self._every else self._every
        return iteration == self._unbalanced or iteration % every == 0

    def add(self, iteration: RankSegments) -> None:
        """Take in an iteration that is wanted."""
        if iteration.iteration == self._unbalanced:
            self._early = iteration
        else:
            self._late.append(iteration)

    def plan_changed(self, iteration: int) -> None:
        """Take note that another plan applies from the iteration after this one on."""
        if self._first_change is None:
            self._first_change = iteration

    def kept(self) -> SampledIterations:
        """The iterations that are kept now, in order."""
        kept = [*self._late] if self._early is None else [self._early, *self._late]
        return SampledIterations(tuple(sorted(kept, key=lambda each: each.iteration)), self._first_change)
