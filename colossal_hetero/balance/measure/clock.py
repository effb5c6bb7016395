"""What a rank's time in an iteration is spent on: products, the rest of blocks, collectives, or other work.

A mark ends a part of the iteration, which began at the mark before. A CPU clock reads the time. A CUDA clock records
events on the current stream and reads them when the device has passed them, usually one iteration late, so that the
host never waits for the device. For selected iterations a clock keeps the parts as segments, for all others only their
sums.

Layers that are balanced give their kind with each mark. The time of a kind is its own work between two collectives of
such layers, because ranks wait for each other there. What lies between other marks (loading data, the embedding, the
loss, the optimizer step) is no time of a kind: balancing cannot change it, and in other collectives a rank may wait.

[Note: overlapped products] On a GPU, dW of a column-parallel layer runs beside the all-reduce of dX, whose kernels take
16 to 32 of 132 multiprocessors, and on a rank that waits for others they run all the time. So fast ranks would look
slower than they are. A CUDA clock therefore judges a rank by its other products, and assumes for dW the time of dX,
which has as many operations. On a CPU the collective takes little time of the rank's core, so dW counts as measured.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_args

import torch

from ...layers.workload import Part
from .timeline_sampler import Segment

__all__ = ["CpuClock", "CudaClock", "IterationClock", "IterationTimes", "KindTimes", "make_clock"]


class KindTimes(NamedTuple):
    """Seconds that a rank worked in one iteration for the layers of one kind."""

    movable: float = 0.0
    """Products, and operations between the products of a block: they are in proportion to the columns or units."""
    fixed: float = 0.0
    """Other work since the collective before: it does not depend on the columns or units."""


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
    migration_seconds: float = 0.0
    """The part of ``communication_seconds`` in which this rank waited for migrated work."""
    kinds: Mapping[int, KindTimes] = field(default_factory=dict)
    """The work for layers that are balanced, by their kind."""

    @property
    def work_seconds(self) -> float:
        """T: all time except communication."""
        return self.matmul_seconds + self.block_seconds + self.other_seconds


class IterationClock(Protocol):
    """A clock that is started and stopped once per iteration and that layers mark."""

    keep_segments: bool
    """Whether iterations that start from now on keep their segments."""

    sample_every: int
    """While nothing changes, it is enough to measure one of so many iterations: measuring costs time."""

    def mark(self, part: Part, kind: int | None = None) -> None: ...

    def start(self) -> None:
        """Begin an iteration; marks before it are ignored."""

    def stop(self, tag: Any = None) -> None:
        """End the iteration; the time since the last mark was other work."""

    def read(self) -> list[IterationTimes]:
        """The iterations whose times have become known since the last call, oldest first."""


class CpuClock:
    """A clock of host time, for work on a CPU."""

    sample_every = 1

    def __init__(self) -> None:
        self.keep_segments = False
        self._finished: list[IterationTimes] = []
        self.start()

    def start(self) -> None:
        self._sums = _Sums(measures_overlapped=True)
        self._marks: list[tuple[Part, float]] | None = [] if self.keep_segments else None
        self._start = self._last = time.perf_counter()

    def mark(self, part: Part, kind: int | None = None) -> None:
        now = time.perf_counter()
        self._sums.add(now - self._last, part, kind)
        self._last = now
        if self._marks is not None:
            self._marks.append((part, now))

    def stop(self, tag: Any = None) -> None:
        self.mark("other")
        segments = () if self._marks is None else _segments(self._start, self._marks)
        self._marks = None
        self._finished.append(self._sums.times(tag, segments, _machine()))

    def read(self) -> list[IterationTimes]:
        finished, self._finished = self._finished, []
        return finished


class _Event(NamedTuple):
    """A mark on the device; the first one of an iteration has no part."""

    part: Part | None
    kind: int | None
    event: torch.cuda.Event


class _Stopped(NamedTuple):
    """A stopped iteration whose events the device may not have passed yet."""

    marks: list[_Event]
    tag: Any
    detailed: bool


class CudaClock:
    """A clock of events on the current stream, which are read when the device has passed them.

    Segments count from the iteration's first event.
    """

    sample_every = 4
    """A mark takes the host some microseconds, and the device a moment between two kernels."""

    def __init__(self) -> None:
        self.keep_segments = False
        self._pool: list[torch.cuda.Event] = []
        self._marks: list[_Event] = []
        self._detailed = False
        self._stopped: deque[_Stopped] = deque()

    def start(self) -> None:
        self._pool.extend(mark.event for mark in self._marks)
        self._marks = [_Event(None, None, self._record())]
        self._detailed = self.keep_segments

    def mark(self, part: Part, kind: int | None = None) -> None:
        if self._marks:
            self._marks.append(_Event(part, kind, self._record()))

    def stop(self, tag: Any = None) -> None:
        self.mark("other")
        if self._marks:
            self._stopped.append(_Stopped(self._marks, tag, self._detailed))
        self._marks = []

    def read(self) -> list[IterationTimes]:
        finished = []
        while self._stopped and self._stopped[0].marks[-1].event.query():
            marks, tag, detailed = self._stopped.popleft()
            sums = _Sums(measures_overlapped=False)
            ends: list[tuple[Part, float]] = []
            elapsed = 0.0
            for before, mark in pairwise(marks):
                assert mark.part is not None
                stretch = before.event.elapsed_time(mark.event) * 1e-3
                sums.add(stretch, mark.part, mark.kind)
                elapsed += stretch
                ends.append((mark.part, elapsed))
            self._pool.extend(mark.event for mark in marks)
            finished.append(sums.times(tag, _segments(0.0, ends) if detailed else (), ""))
        return finished

    def _record(self) -> torch.cuda.Event:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def make_clock(device: torch.device) -> IterationClock:
    """The clock for products that run on ``device``."""
    return CudaClock() if device.type == "cuda" else CpuClock()


class _Sums:
    """The seconds of an iteration by part and by kind.

    Args:
        measures_overlapped: whether overlapped products count as measured for kinds; see [Note: overlapped products].
    """

    def __init__(self, *, measures_overlapped: bool) -> None:
        self._measures_overlapped = measures_overlapped
        self._own_product = 0.0
        """The first product since work other than products: before an overlapped dW this is dX."""
        self._follows_product = False
        self._parts: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
        self._movable: dict[int, float] = {}
        self._fixed: dict[int, float] = {}
        self._kind_before: int | None = None

    def add(self, seconds: float, part: Part, kind: int | None) -> None:
        """Add the time between two marks, the second of which is that of ``part`` and ``kind``."""
        self._parts[part] += seconds
        if part == "matmul" and not self._follows_product:
            self._own_product, self._follows_product = seconds, True
        elif part not in ("matmul", "overlapped", "migration"):
            self._follows_product = False
        if kind is not None:
            if part in ("matmul", "block"):
                self._movable[kind] = self._movable.get(kind, 0.0) + seconds
            elif part == "overlapped":
                counted = seconds if self._measures_overlapped else self._own_product
                self._movable[kind] = self._movable.get(kind, 0.0) + counted
            elif part == "other" and self._kind_before is not None:
                self._fixed[kind] = self._fixed.get(kind, 0.0) + seconds
        self._kind_before = kind

    def times(self, tag: Any, segments: tuple[Segment, ...], time_base: str) -> IterationTimes:
        return IterationTimes(
            matmul_seconds=self._parts["matmul"] + self._parts["overlapped"],
            communication_seconds=self._parts["communication"] + self._parts["migration"],
            other_seconds=self._parts["other"],
            tag=tag,
            block_seconds=self._parts["block"],
            segments=segments,
            time_base=time_base,
            migration_seconds=self._parts["migration"],
            kinds={kind: KindTimes(self._movable[kind], self._fixed.get(kind, 0.0)) for kind in sorted(self._movable)},
        )


_SEGMENT_KINDS: dict[str, Any] = {"migration": "communication", "overlapped": "matmul"}


def _segments(start_seconds: float, marks: Sequence[tuple[Part, float]]) -> tuple[Segment, ...]:
    """The segments from the start on, given ``marks`` with the part and the end of each."""
    segments: list[Segment] = []
    last = start_seconds
    for part, end in marks:
        kind = _SEGMENT_KINDS.get(part, part)
        if segments and segments[-1].kind == kind:
            segments[-1] = Segment(kind, segments[-1].start_seconds, end)
        else:
            segments.append(Segment(kind, last, end))
        last = end
    return tuple(segments)


@functools.cache
def _machine() -> str:
    """The boot of this machine, whose processes share a monotonic clock; empty if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
