"""Where a rank's time goes in an iteration: products, collectives, or other work.

Parts of an iteration are told by marks, each closing the stretch since the one before. A CPU clock reads the time; a
CUDA clock records events on the current stream and reads them when they are done, usually one iteration late, so
that the host never waits for the device.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from ..layers.workload import Part

__all__ = ["CpuClock", "CudaClock", "IterationClock", "IterationTimes", "make_clock"]


@dataclass(frozen=True)
class IterationTimes:
    """Seconds of one iteration on this rank."""

    matmul_seconds: float
    communication_seconds: float
    other_seconds: float
    tag: Any = None
    """What the iteration's owner attached to it."""

    @property
    def work_seconds(self) -> float:
        """T: everything but communication."""
        return self.matmul_seconds + self.other_seconds


class IterationClock(Protocol):
    """A clock that layers mark and that is started and stopped once per iteration."""

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
        self._finished: list[IterationTimes] = []
        self.start()

    def start(self) -> None:
        self._seconds = {"matmul": 0.0, "block": 0.0, "communication": 0.0, "other": 0.0}
        self._last = time.perf_counter()

    def mark(self, part: Part) -> None:
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def stop(self, tag: Any = None) -> None:
        self.mark("other")
        seconds = self._seconds
        self._finished.append(IterationTimes(seconds["matmul"], seconds["communication"], seconds["other"], tag))

    def read(self) -> list[IterationTimes]:
        finished, self._finished = self._finished, []
        return finished


class CudaClock:
    """Events on the current stream, read only when the device has passed them."""

    def __init__(self) -> None:
        self._pool: list[torch.cuda.Event] = []
        self._marks: list[tuple[Part | None, torch.cuda.Event]] = []
        self._stopped: deque[tuple[list[tuple[Part | None, torch.cuda.Event]], Any]] = deque()

    def start(self) -> None:
        self._pool.extend(event for _, event in self._marks)
        self._marks = [(None, self._record())]

    def mark(self, part: Part) -> None:
        if self._marks:
            self._marks.append((part, self._record()))

    def stop(self, tag: Any = None) -> None:
        self.mark("other")
        if self._marks:
            self._stopped.append((self._marks, tag))
        self._marks = []

    def read(self) -> list[IterationTimes]:
        finished = []
        while self._stopped and self._stopped[0][0][-1][1].query():
            marks, tag = self._stopped.popleft()
            seconds = {"matmul": 0.0, "block": 0.0, "communication": 0.0, "other": 0.0}
            for (_, before), (part, after) in pairwise(marks):
                assert part is not None
                seconds[part] += before.elapsed_time(after) * 1e-3
            self._pool.extend(event for _, event in marks)
            finished.append(IterationTimes(seconds["matmul"], seconds["communication"], seconds["other"], tag))
        return finished

    def _record(self) -> torch.cuda.Event:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def make_clock(device: torch.device) -> IterationClock:
    """The clock for products that run on ``device``."""
    return CudaClock() if device.type == "cuda" else CpuClock()
