"""What one rank keeps in detail: the segments of a few of its iterations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["SAMPLE_EVERY", "Kind", "RankSegments", "SampledIterations", "Segment", "TimelineSampler"]

Kind = Literal["matmul", "block", "other", "communication", "waiting"]


SAMPLE_EVERY = 8
"""Of how many iterations one is kept in detail."""


class Segment(NamedTuple):
    """A stretch of a rank's iteration spent on one thing."""

    kind: Kind
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class RankSegments:
    """One iteration as one rank saw it."""

    iteration: int
    segments: tuple[Segment, ...]
    """Without waiting, which no rank can tell from communication by itself."""
    time_base: str
    """Where equal and not empty, the seconds of two ranks count from the same moment."""


@dataclass(frozen=True)
class SampledIterations:
    """What a rank kept in detail."""

    iterations: tuple[RankSegments, ...]
    first_change: int | None
    """The iteration at the end of which the rank's group first changed its plan."""


class TimelineSampler:
    """Keeps a few iterations of a rank in detail: the last one that is sure to be unbalanced, and the latest.

    The choice depends on nothing but the iteration's number, so that all ranks keep the same.
    """

    def __init__(self, warmup_iterations: int, patience: int) -> None:
        # Speeds are judged from `warmup + patience` iterations on; the answer to the flag that is raised then is read,
        # and the plan changed, at the end of this one.
        self._unbalanced = warmup_iterations + patience
        self._early: RankSegments | None = None
        # Two, as ranks may be an iteration apart in what their clocks have read.
        self._late: deque[RankSegments] = deque(maxlen=2)
        self._first_change: int | None = None

    def wants(self, iteration: int) -> bool:
        """Whether the clock should keep the segments of this iteration."""
        return iteration == self._unbalanced or iteration % SAMPLE_EVERY == 0

    def add(self, iteration: RankSegments) -> None:
        """Take in an iteration that was wanted."""
        if iteration.iteration == self._unbalanced:
            self._early = iteration
        else:
            self._late.append(iteration)

    def plan_changed(self, iteration: int) -> None:
        """Another plan holds from the iteration after this one on."""
        if self._first_change is None:
            self._first_change = iteration

    def kept(self) -> SampledIterations:
        """What there is now, by iteration."""
        kept = [*self._late] if self._early is None else [self._early, *self._late]
        return SampledIterations(tuple(sorted(kept, key=lambda each: each.iteration)), self._first_change)
