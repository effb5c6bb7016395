"""Time functions on a device, in turns, so that a device that changes its clock rate changes all of them equally."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

__all__ = ["seconds_in_turns"]


MAX_CLOCK_RATE = 2e9
"""Cycles per second that no GPU exceeds by much."""


def seconds_in_turns(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int,
    warmup: int = 3,
    calls: int = 1,
    head_start_seconds: float = 0.0,
) -> dict[str, float]:
    """Median seconds of a call of each function.

    On a GPU the time lies between two events of the current stream, so it is that of the device: launches that the
    device waits for count, launches that run ahead do not.

    Args:
        functions: by name.
        device: what they run on.
        rounds: measurements of each function.
        warmup: calls of each function that are not timed.
        calls: calls in one measurement.
        head_start_seconds: on a GPU, how long the device sleeps before each measurement begins, while the host already
            launches. If that takes no longer, launches do not count.
    """
    for function in functions.values():
        for _ in range(warmup):
            function()
    spent: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            spent[name].append(_seconds(function, device, calls, head_start_seconds))
    return {name: median(times) for name, times in spent.items()}


def _seconds(function: Callable[[], object], device: torch.device, calls: int, head_start_seconds: float) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - begin) / calls
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    if head_start_seconds > 0:
        torch.cuda._sleep(int(head_start_seconds * MAX_CLOCK_RATE))
    first.record()
    for _ in range(calls):
        function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e-3 / calls
