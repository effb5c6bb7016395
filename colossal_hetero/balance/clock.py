"""Clocks of what a rank's time in an iteration is spent on: products, the rest of blocks, collectives, or other work.

A mark ends a part of the iteration. A CUDA clock records events, and reads them when the device has passed them, so
that the host never waits. An event takes the host some microseconds, so there are none for inner parts. Layers that are
balanced give their kind with each mark. The time of a kind is its own work between two collectives of such layers.
Balancing cannot change the time between other marks (loading data, the embedding, the loss, the optimizer step), and in
other collectives a rank may wait.

[Note: overlapped products] On a GPU, dW of a column-parallel layer runs beside the all-reduce of dX, whose kernels take
16 to 32 of 132 multiprocessors, all the time on a rank that waits for others: fast ranks would look slower than they
are. A CUDA clock therefore assumes for dW the time of dX, which has as many operations. On a CPU dW counts as measured,
because the collective takes little time of the rank's core. Without an event in front of a block's second dX, an
activation function there is taken for a part of it (1 or 2 % of an MLP, on all ranks).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch

from ..layers.workload import Part


class KindTimes(NamedTuple):
    """Seconds that a rank worked in one iteration for the layers of one kind."""

    movable: float = 0.0
    """Products and operations between the products of a block, in proportion to the columns or units."""
    fixed: float = 0.0  # other work since the collective before, which does not depend on the columns or units


@dataclass(frozen=True)
class IterationTimes:
    matmul_seconds: float
    """Time in products, and between those of a block (activation functions, attention), which moves with its units."""
    communication_seconds: float
    other_seconds: float
    tag: Any = None
    migration_seconds: float = 0.0  # the part of ``communication_seconds`` in which this rank waited for migrated work
    kinds: Mapping[int, KindTimes] = field(default_factory=dict)
    starved: float = 0.0  # the share of parts in which a GPU had nothing to do until the host launched the next work

    @property
    def work_seconds(self) -> float:
        """T: all time except communication."""
        return self.matmul_seconds + self.other_seconds


class CpuClock:
    """A clock that is started and stopped once per iteration and that layers mark."""

    sample_every = 1  # measuring one of so many iterations is enough while nothing changes; measuring costs time

    def __init__(self) -> None:
        self._finished: list[IterationTimes] = []
        self.start()

    def start(self) -> None:
        """Begin an iteration; marks before it are ignored."""
        self._sums = _Sums(measures_overlapped=True)
        self._last = time.perf_counter()

    def mark(self, part: Part, kind: int | None = None, inner: bool = False) -> None:
        now = time.perf_counter()
        self._sums.add(now - self._last, part, kind)
        self._last = now

    def stop(self, tag: Any = None) -> None:
        """End the iteration; the time since the last mark was other work."""
        self.mark("other")
        self._finished.append(self._sums.times(tag))

    def read(self) -> list[IterationTimes]:
        """The iterations whose times have become known since the last call, oldest first."""
        finished, self._finished = self._finished, []
        return finished


STARVED_EVERY = 3
"""One of so many marks asks whether the GPU has passed the event before, which costs about as much as an event. Layers
have 14, 20 or 40 events, so that each of their places comes up in turn."""
READ_AT_ONCE = 1024  # number of events that are read in one call while there is time: about a millisecond of the host
_Mark = tuple[Part | Literal["beside"], int | None, torch.cuda.Event]
"""A part, its kind and its end on the device. ``beside``: a product and the collective that it runs beside."""


@dataclass
class _Stopped:
    """A stopped iteration whose events the device may not have passed yet."""

    marks: list[_Mark]  # the first one is the start
    tag: Any
    sums: _Sums
    starved: float
    events_read: int = 0


class CudaClock:
    """A clock of events on the stream that is current when an iteration starts. If the
    device has passed an event before the next is recorded, the time between may be that of the host's launches."""

    sample_every = 16
    """A mark takes the host some microseconds, and the device a moment: about a thirtieth of an iteration at
    tensor-parallel degree 8, averaged far below a percent."""

    def __init__(self, host_waits: bool = False) -> None:
        self._host_waits = host_waits
        self._stream: Any = None
        self._pool: list[torch.cuda.Event] = []
        self._marks: list[_Mark] = []
        self._inner: tuple[Part, int | None] | None = None
        self._starved = 0
        self._stopped: deque[_Stopped] = deque()

    def start(self) -> None:
        self._pool.extend(event for _, _, event in self._marks)
        self._stream = torch.cuda.current_stream()
        self._inner, self._starved = None, 0
        self._marks = [("other", None, self._record())]

    def mark(self, part: Part, kind: int | None = None, inner: bool = False) -> None:
        if not self._marks:
            return
        if inner:
            self._inner = self._inner or (part, kind)
            return
        known: Part | Literal["beside"] = part
        if self._inner is not None:
            if part == "communication" and self._inner[0] == "overlapped":
                known = "beside"
            elif part == "other":
                # Nothing else of the block followed.
                known, kind = self._inner
            self._inner = None
        if not self._host_waits and len(self._marks) % STARVED_EVERY == 0:
            self._starved += self._marks[-1][2].query()
        self._marks.append((known, kind, self._record()))

    def stop(self, tag: Any = None) -> None:
        self.mark("other")
        if self._marks:
            starved = self._starved / max(1, (len(self._marks) - 1) // STARVED_EVERY)
            self._stopped.append(_Stopped(self._marks, tag, _Sums(measures_overlapped=False), starved))
        self._marks = []

    def read(self) -> list[IterationTimes]:
        finished = []
        while self._stopped and self._stopped[0].marks[-1][2].query():
            # If another iteration waits, this one must be finished, or times would come later and later.
            first = self._stopped[0]
            self._read(first, READ_AT_ONCE if len(self._stopped) == 1 else len(first.marks))
            if first.events_read < len(first.marks) - 1:
                break
            self._stopped.popleft()
            self._pool.extend(event for _, _, event in first.marks)
            finished.append(replace(first.sums.times(first.tag), starved=first.starved))
        return finished

    def _read(self, stopped: _Stopped, events: int) -> None:
        last = min(stopped.events_read + events, len(stopped.marks) - 1)
        for (_, _, begin), (part, kind, end) in pairwise(stopped.marks[stopped.events_read : last + 1]):
            stopped.sums.add(begin.elapsed_time(end) * 1e-3, part, kind)
        stopped.events_read = last

    def _record(self) -> torch.cuda.Event:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


IterationClock = CpuClock | CudaClock


def make_clock(device: torch.device, host_waits: bool = False) -> IterationClock:
    return CudaClock(host_waits) if device.type == "cuda" else CpuClock()


class _Sums:
    """The seconds of an iteration by part and by kind; ``measures_overlapped``: see [Note: overlapped products]."""

    def __init__(self, *, measures_overlapped: bool) -> None:
        self._measures_overlapped = measures_overlapped
        self._own_product = 0.0  # the first product since work other than products: before an overlapped dW this is dX
        self._follows_product = False
        self._parts: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
        self._movable: dict[int, float] = {}
        self._fixed: dict[int, float] = {}
        self._kind_before: int | None = None

    def add(self, seconds: float, part: Part | Literal["beside"], kind: int | None) -> None:
        if part == "beside":
            product = min(self._own_product, seconds)
            self.add(product, "overlapped", kind)
            self.add(seconds - product, "communication", kind)
            return
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

    def times(self, tag: Any) -> IterationTimes:
        return IterationTimes(
            matmul_seconds=self._parts["matmul"] + self._parts["overlapped"] + self._parts["block"],
            communication_seconds=self._parts["communication"] + self._parts["migration"],
            other_seconds=self._parts["other"],
            tag=tag,
            migration_seconds=self._parts["migration"],
            kinds={kind: KindTimes(self._movable[kind], self._fixed.get(kind, 0.0)) for kind in sorted(self._movable)},
        )
