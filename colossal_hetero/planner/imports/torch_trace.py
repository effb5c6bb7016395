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
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from .whole_model import WholeModelTimes

__all__ = ["read_torch_trace"]

Event = Mapping[str, Any]
BACKWARD, STEP, OPTIMIZER = "autograd::engine::evaluate_function", "ProfilerStep#", "Optimizer.step#"


def read_torch_trace(path: Path | str, micro_batches: int) -> WholeModelTimes:
    """The times of the whole model: medians over the iterations of the trace.

    Args:
        path: The trace, ``.json`` or ``.json.gz``.
        micro_batches: Passes per iteration.

    Raises:
        ValueError: The file cannot be read, is no such trace, or lacks something: the message says what.
    """
    events = [each for each in _events(Path(path)) if each.get("ph") == "X"]
    named = [each for each in events if isinstance(each.get("name"), str)]
    steps = sorted((each for each in named if each["name"].startswith(STEP)), key=_start)
    steps = [each for each in steps if each.get("cat") != "gpu_user_annotation"]
    backward = [each for each in named if each["name"].startswith(BACKWARD)]
    if not steps:
        raise ValueError(
            f"{path} has no {STEP}N ranges; profile with a schedule, and call profiler.step() after each iteration"
        )
    if not backward:
        raise ValueError(f"{path} has no backward pass ({BACKWARD}); profile training with ProfilerActivity.CPU")
    kernels = [each for each in named if each.get("cat") == "kernel"]
    if kernels:
        launches = {
            each["args"]["correlation"]: _start(each)
            for each in named
            if each.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in each.get("args", {})
        }
        work = [
            (launches[each["args"]["correlation"]], float(each["dur"]))
            for each in kernels
            if each.get("args", {}).get("correlation") in launches
        ]
        if not work:
            raise ValueError(
                f"{path} has kernels, but not their launches; profile with ProfilerActivity.CPU and with "
                "ProfilerActivity.CUDA"
            )
    else:
        work = [(_start(each), float(each["dur"])) for each in _outermost(named)]
    optimizer = [(_start(each), _end(each)) for each in named if each["name"].startswith(OPTIMIZER)]
    passes = _joined([(_start(each), _end(each)) for each in backward])
    found = []
    for step in steps:
        inside = [(start, duration) for start, duration in work if _start(step) <= start < _end(step)]
        updates = sum(duration for start, duration in inside if _covers(optimizer, start))
        behind = sum(duration for start, duration in inside if _covers(passes, start))
        first = sum(duration for _, duration in inside) - updates - behind
        found.append((first / micro_batches, behind / micro_batches, updates))
    return WholeModelTimes(*(statistics.median(column) / 1e6 for column in zip(*found, strict=True)))


def _events(path: Path) -> list[Event]:
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        content = json.loads(text)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list) or not all(isinstance(each, dict) for each in events):
        raise ValueError(f"{path} has no list traceEvents; export it with profiler.export_chrome_trace")
    return events


def _start(event: Event) -> float:
    return float(event["ts"])


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])


def _outermost(events: Iterable[Event]) -> list[Event]:
    """Operators that are not inside another one of their thread."""
    threads: dict[object, list[Event]] = {}
    for each in events:
        if each.get("cat") == "cpu_op":
            threads.setdefault((each.get("pid"), each.get("tid")), []).append(each)
    found: list[Event] = []
    for own in threads.values():
        end = float("-inf")
        for each in sorted(own, key=lambda event: (_start(event), -_end(event))):
            if _start(each) >= end:
                found.append(each)
                end = _end(each)
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
