"""Where a rank's time goes in an iteration: products, the rest of blocks, collectives, or other work.

Parts of an iteration are told by marks, each closing the stretch since the one before. A CPU clock reads the time; a
CUDA clock records events on the current stream and reads them when they are done, usually one iteration late, so
that the host never waits for the device. Of iterations that are wanted in detail a clock keeps the stretches
themselves, of all others only their sums.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ...layers.workload import Part
from .timeline_sampler import Segment

__all__ = ["CpuClock", "CudaClock", "IterationClock", "IterationTimes", "make_clock"]


@dataclass(frozen=True)
class IterationTimes:
    """Seconds of one iteration on this rank."""

    matmul_seconds: float
    communication_seconds: float
    other_seconds: float
    tag: Any = None
    """What the iteration's owner attached to it."""
    block_seconds: float = 0.0
    """Between the products of a block: activation functions, attention. It moves with whole blocks."""
    segments: tuple[Segment, ...] = ()
    """The iteration's stretches in order, neighbors of one kind as one; empty unless they were asked for."""
    time_base: str = ""
    """Where equal and not empty, the segments of two ranks count from the same moment."""

    @property
    def work_seconds(self) -> float:
        """T: everything but communication."""
        return self.matmul_seconds + self.block_seconds + self.other_seconds


class IterationClock(Protocol):
    """A clock that layers mark and that is started and stopped once per iteration."""

    keep_segments: bool
    """Whether the iterations that start from now on carry their segments."""

    def mark(self, part: Part) -> None: ...

    def start(self) -> None:
        """An iteration begins now; marks before it count for nothing."""

    def stop(self, tag: Any = None) -> None:
        """The iteration ends now; the last stretch was other work."""

    def read(self) -> list[IterationTimes]:
        """The iterations that have become known since the last call, oldest first."""


class CpuClock:
    """Host time; CPU work is in program order."""

    def __init__(self) -> None:
        self.keep_segments = False
        self._finished: list[IterationTimes] = []
        self.start()

    def start(self) -> None:
        self._seconds = _no_seconds()
        self._marks: list[tuple[Part, float]] | None = [] if self.keep_segments else None
        self._start = self._last = time.perf_counter()

    def mark(self, part: Part) -> None:
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now
        if self._marks is not None:
            self._marks.append((part, now))

    def stop(self, tag: Any = None) -> None:
        self.mark("other")
        segments = () if self._marks is None else _segments(self._start, self._marks)
        self._marks = None
        self._finished.append(_times(self._seconds, tag, segments, _machine()))

    def read(self) -> list[IterationTimes]:
        finished, self._finished = self._finished, []
        return finished


class _Stopped(NamedTuple):
    """An iteration whose events the device may not have passed yet."""

    marks: list[tuple[Part | None, torch.cuda.Event]]
    tag: Any
    detailed: bool


class CudaClock:
    """Events on the current stream, read only when the device has passed them.

    Segments count from the iteration's first event.
    """

    def __init__(self) -> None:
        self.keep_segments = False
        self._pool: list[torch.cuda.Event] = []
        self._marks: list[tuple[Part | None, torch.cuda.Event]] = []
        self._detailed = False
        self._stopped: deque[_Stopped] = deque()

    def start(self) -> None:
        self._pool.extend(event for _, event in self._marks)
        self._marks = [(None, self._record())]
        self._detailed = self.keep_segments

    def mark(self, part: Part) -> None:
        if self._marks:
            self._marks.append((part, self._record()))

    def stop(self, tag: Any = None) -> None:
        self.mark("other")
        if self._marks:
            self._stopped.append(_Stopped(self._marks, tag, self._detailed))
        self._marks = []

    def read(self) -> list[IterationTimes]:
        finished = []
        while self._stopped and self._stopped[0].marks[-1][1].query():
            marks, tag, detailed = self._stopped.popleft()
            seconds = _no_seconds()
            ends: list[tuple[Part, float]] = []
            elapsed = 0.0
            for (_, before), (part, after) in pairwise(marks):
                assert part is not None
                stretch = before.elapsed_time(after) * 1e-3
                seconds[part] += stretch
                elapsed += stretch
                ends.append((part, elapsed))
            self._pool.extend(event for _, event in marks)
            finished.append(_times(seconds, tag, _segments(0.0, ends) if detailed else (), ""))
        return finished

    def _record(self) -> torch.cuda.Event:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def make_clock(device: torch.device) -> IterationClock:
    """The clock for products that run on ``device``."""
    return CudaClock() if device.type == "cuda" else CpuClock()


def _no_seconds() -> dict[Part, float]:
    return {"matmul": 0.0, "block": 0.0, "communication": 0.0, "other": 0.0}


def _times(seconds: dict[Part, float], tag: Any, segments: tuple[Segment, ...], time_base: str) -> IterationTimes:
    return IterationTimes(
        matmul_seconds=seconds["matmul"],
        communication_seconds=seconds["communication"],
        other_seconds=seconds["other"],
        tag=tag,
        block_seconds=seconds["block"],
        segments=segments,
        time_base=time_base,
    )


def _segments(start_seconds: float, marks: Sequence[tuple[Part, float]]) -> tuple[Segment, ...]:
    """The stretches that ``marks``, each a part and its end, divide the time since the start into."""
    segments: list[Segment] = []
    last = start_seconds
    for part, end in marks:
        if segments and segments[-1].kind == part:
            segments[-1] = Segment(part, segments[-1].start_seconds, end)
        else:
            segments.append(Segment(part, last, end))
        last = end
    return tuple(segments)


@functools.cache
def _machine() -> str:
    """The running system, whose processes share a monotonic clock; empty where that cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
