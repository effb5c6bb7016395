"""Times in a trace that ``torch.profiler`` exported for Chrome (``export_chrome_trace``).

An iteration is what a ``ProfilerStep#N`` range covers, which profilers with a ``schedule`` write. The optimizer's step
is its ``Optimizer.step`` range. What autograd runs (``autograd::engine::evaluate_function``) is backward, and all other
work is forward. On a GPU, the time of a phase is that of the kernels that were launched in it. Without kernels it is
the time that threads spent in operators.
"""

from __future__ import annotations

import gzip
import json
import statistics
import zlib
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from .whole_model import WholeModelTimes

__all__ = ["read_torch_trace"]

BACKWARD, STEP, OPTIMIZER = "autograd::engine::evaluate_function", "ProfilerStep#", "Optimizer.step#"


LAUNCHES = ("cuda_runtime", "cuda_driver")
"""Categories of calls that launch kernels."""
MAX_MICROSECONDS = 1e18
"""Of a time; clocks that count from 1970 are below it."""


class TraceEvent(NamedTuple):
    """A range of time in which something ran, in microseconds."""

    name: str
    category: str
    start: float
    duration: float
    thread: Hashable
    """Process and thread."""
    correlation: Hashable
    """Number that a kernel and its launch have in common; without one it equals no other."""

    @property
    def end(self) -> float:
        """When it ended."""
        return self.start + self.duration


def read_torch_trace(path: Path | str, micro_batches: int) -> WholeModelTimes:
    """The times of the whole model: medians over the iterations of the trace.

    Args:
        path: The trace, ``.json`` or ``.json.gz``.
        micro_batches: Passes per iteration.

    Raises:
        ValueError: The file cannot be read, is no such trace, or lacks something: the message says what.
    """
    events = _events(Path(path))
    steps = sorted((each for each in events if each.name.startswith(STEP)), key=lambda each: each.start)
    steps = [each for each in steps if each.category != "gpu_user_annotation"]
    backward = [each for each in events if each.name.startswith(BACKWARD)]
    if not steps:
        raise ValueError(
            f"{path} has no {STEP}N ranges; profile with a schedule, and call profiler.step() after each iteration"
        )
    if not backward:
        raise ValueError(f"{path} has no backward pass ({BACKWARD}); profile training with ProfilerActivity.CPU")
    kernels = [each for each in events if each.category == "kernel"]
    if kernels:
        launches = {each.correlation: each.start for each in events if each.category in LAUNCHES}
        work = [(launches[each.correlation], each.duration) for each in kernels if each.correlation in launches]
        if not work:
            raise ValueError(
                f"{path} has kernels, but not their launches; profile with ProfilerActivity.CPU and with "
                "ProfilerActivity.CUDA"
            )
    else:
        work = [(each.start, each.duration) for each in _outermost(events)]
    optimizer = [(each.start, each.end) for each in events if each.name.startswith(OPTIMIZER)]
    passes = _joined([(each.start, each.end) for each in backward])
    found = []
    for step in steps:
        inside = [(start, duration) for start, duration in work if step.start <= start < step.end]
        updates = sum(duration for start, duration in inside if _covers(optimizer, start))
        behind = sum(duration for start, duration in inside if _covers(passes, start))
        first = sum(duration for _, duration in inside) - updates - behind
        found.append((first / micro_batches, behind / micro_batches, updates))
    return WholeModelTimes(*(statistics.median(column) / 1e6 for column in zip(*found, strict=True)))


def _events(path: Path) -> list[TraceEvent]:
    """The ranges of the trace that have a name."""
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        content = json.loads(text)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} cannot be read: its lists or objects are nested too deeply") from None
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list) or not all(isinstance(each, dict) for each in events):
        raise ValueError(f"{path} has no list traceEvents; export it with profiler.export_chrome_trace")
    return [
        _event(path, number, each)
        for number, each in enumerate(events)
        if each.get("ph") == "X" and isinstance(each.get("name"), str)
    ]


def _event(path: Path, number: int, content: Mapping[str, Any]) -> TraceEvent:
    arguments = content.get("args")
    correlation = arguments.get("correlation") if isinstance(arguments, dict) else None
    return TraceEvent(
        content["name"],
        str(content.get("cat")),
        _microseconds(path, number, content, "ts", -MAX_MICROSECONDS),
        _microseconds(path, number, content, "dur", 0),
        (str(content.get("pid")), str(content.get("tid"))),
        # A kernel without a number has no known launch.
        object() if correlation is None else str(correlation),
    )


def _microseconds(path: Path, number: int, content: Mapping[str, Any], name: str, least: float) -> float:
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MAX_MICROSECONDS:
        raise ValueError(
            f"{path}: traceEvents[{number}] ({content['name']}) has {name} {str(value)[:40]}; it must be a number of "
            f"microseconds{', at least 0' if least == 0 else ''}"
        )
    return float(value)


def _outermost(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Operators that are not inside another one of their thread."""
    threads: dict[Hashable, list[TraceEvent]] = {}
    for each in events:
        if each.category == "cpu_op":
            threads.setdefault(each.thread, []).append(each)
    found: list[TraceEvent] = []
    for own in threads.values():
        end = float("-inf")
        for each in sorted(own, key=lambda event: (event.start, -event.end)):
            if each.start >= end:
                found.append(each)
                end = each.end
    return found


def _joined(ranges: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The ranges in order, those that overlap as one."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    assert all(one[1] < other[0] for one, other in pairwise(joined))
    return joined


def _covers(ranges: Sequence[tuple[float, float]], moment: float) -> bool:
    """Whether a moment is in one of the ranges, which are in order."""
    number = bisect_right(ranges, (moment, float("inf"))) - 1
    return number >= 0 and ranges[number][0] <= moment < ranges[number][1]
