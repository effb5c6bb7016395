"""What a rank's time in an iteration is spent on: products, the rest of blocks, collectives, or other work.

A mark ends a part of the iteration, which began at the mark before. A CPU clock reads the time. A CUDA clock records
events on the current stream and reads them when the device has passed them, usually one iteration late, so that the
host never waits for the device. For selected iterations a clock keeps the parts as segments, for all others only their
sums.
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
    """The tag that was given to :meth:`IterationClock.stop`."""
    block_seconds: float = 0.0
    """Time between the products of a block (activation functions, attention), which moves with whole units."""
    segments: tuple[Segment, ...] = ()
    """The iteration's parts in order, with adjacent parts of one kind merged; empty unless they were requested."""
    time_base: str = ""
    """If it is equal on two ranks and not empty, their segments count from the same moment."""

    @property
    def work_seconds(self) -> float:
        """T: all time except communication."""
        return self.matmul_seconds + self.block_seconds + self.other_seconds


class IterationClock(Protocol):
    """A clock that is started and stopped once per iteration and that layers mark."""

    keep_segments: bool
    """Whether iterations that start from now on keep their segments."""

    def mark(self, part: Part) -> None: ...

    def start(self) -> None:
        """Begin an iteration; marks before it are ignored."""

    def stop(self, tag: Any = None) -> None:
        """End the iteration; the time since the last mark was other work."""

    def read(self) -> list[IterationTimes]:
        """The iterations whose times have become known since the last call, oldest first."""


class CpuClock:
    """A clock of host time, for work on a CPU."""

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
    """A stopped iteration whose events the device may not have passed yet."""

    marks: list[tuple[Part | None, torch.cuda.Event]]
    tag: Any
    detailed: bool


class CudaClock:
    """A clock of events on the current stream, which are read when the device has passed them.

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
    """The segments from the start on, given ``marks`` with the part and the end of each."""
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
    """The boot of this machine, whose processes share a monotonic clock; empty if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
