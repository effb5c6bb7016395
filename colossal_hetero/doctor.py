"""Watch a distributed training script and say which rank is slow, why, what it costs, and what would help.

``torchrun … -m colossal_hetero.doctor train.py``; or in a script, before it imports functions of ``torch.distributed``
by name: ``from colossal_hetero.doctor import watch; watch()``. See ``docs/doctor.md``.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import resource
import sys
import threading
import time
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from .common.tables import make_table, number_column

# Decisions: numbers in, findings out ----------------------------------------------------------------------------------

MIN_SHARE = 0.1  # of an iteration, to be worth a sentence; of all ranks' loaders and communication, twice that
MIN_WINDOWS = 5
NOISE_FACTOR = 4.0  # standard errors from which a difference between ranks counts
FAULT_SECONDS = 1e-4  # to read a page from an SSD
SLOW_MESSAGE_SECONDS = 0.008  # 1 MB at 1 Gbit/s


@dataclass(frozen=True, kw_only=True)
class Window:
    """Means per iteration over some successive iterations of one rank; times in seconds."""

    number: float  # the same iterations have the same number on all ranks
    wall: float
    forward: float = 0.0  # wall time in forward passes, without calls of collectives
    forward_cpu: float = 0.0
    rest_cpu: float = 0.0  # CPU time elsewhere, without loaders and calls of collectives
    delay: float = 0.0  # the thread could run but got no core: a CPU quota, or other programs on its core
    loader: float = 0.0
    gpu: float = 0.0  # in the forward passes of modules without submodules, so without communication; 0 on a CPU
    gpu_forward: float = 0.0  # GPU time from the first of these modules to the last
    faults: float = 0.0  # major page faults
    retries: float = 0.0  # allocations of GPU memory that succeeded only after the cache was emptied

    @property
    def own(self) -> float:
        """Work time. Who waits in a collective sleeps: that takes no CPU time, and the thread wants no core.

        On a CPU it is ``forward_cpu + rest_cpu + delay``, or ``forward + rest_cpu`` if that is more (a forward pass
        that sleeps). On a GPU it is ``3 · gpu``, as a backward pass has twice the operations of a forward pass.
        """
        on_cpu = max(self.forward, self.forward_cpu + self.delay) + self.rest_cpu
        return min(3 * self.gpu or on_cpu, max(self.wall - self.loader, 0.0))

    @property
    def wait(self) -> float:
        """Time in communication: waiting for other ranks, and transfers."""
        return max(self.wall - self.own - self.loader, 0.0)

    @property
    def cpu_share(self) -> float:
        """Share of a core that the thread got of what it wanted."""
        used = self.forward_cpu + self.rest_cpu
        return used / (used + self.delay) if used else 1.0


Ranks = Sequence[Sequence[Window]]  # the windows of each rank


@dataclass(frozen=True)
class Link:
    """Seconds of a message in one direction."""

    ranks: tuple[int, int]
    small_seconds: float
    large_seconds: float  # of 1 MB


@dataclass(frozen=True)
class Finding:
    cause: str  # compute, loader, network, memory or host
    ranks: tuple[int, ...]  # none: all of them
    seconds: float  # that it costs per iteration
    predicted_seconds: float  # of an iteration after the remedy, or a lower bound
    why: str
    remedy: str


def typical(windows: Sequence[Window], field: str) -> float:
    return median(getattr(window, field) for window in windows)


def in_same_windows(ranks: Ranks, field: str) -> list[list[float]]:
    """The values of all ranks, for each window that all ranks have."""
    values = [{window.number: getattr(window, field) for window in windows} for windows in ranks]
    return [[each[number] for each in values] for number in sorted(set.intersection(*map(set, values)))]


def excess(ranks: Ranks, rank: int, field: str) -> tuple[float, float]:
    """Median by which a rank exceeds the median of the others in the same windows, and its standard error.

    It is at most the difference of their medians over all windows: the medians of skewed noise differ otherwise. The
    error comes from differences of successive windows: of normal noise the median of their absolute values is
    0.6745·√2·σ, and the standard error of a median of n is 1.2533·σ/√n.
    """
    rows = in_same_windows(ranks, field)
    if len(rows) < MIN_WINDOWS:
        return 0.0, float("inf")
    more = [row[rank] - median(row[:rank] + row[rank + 1 :]) for row in rows]
    steps = [abs(after - before) for before, after in pairwise(more)]
    others = [typical(windows, field) for other, windows in enumerate(ranks) if other != rank]
    overall = typical(ranks[rank], field) - median(others)
    return min(median(more), overall), 1.2533 * median(steps) / (0.6745 * 2**0.5) / len(more) ** 0.5


def slow_ranks(ranks: Ranks, field: str) -> dict[int, float]:
    """By rank: seconds by which it exceeds the others, if that is more than noise and worth a sentence."""
    found = {rank: excess(ranks, rank, field) for rank in range(len(ranks))}
    least = MIN_SHARE * typical(ranks[0], "wall")
    return {rank: more for rank, (more, error) in found.items() if more >= max(least, NOISE_FACTOR * error)}


def communication(ranks: Ranks) -> float:
    """Time in communication of the rank that waits least, so that nobody is late for it."""
    return median([min(row) for row in in_same_windows(ranks, "wait")] or [0.0])


def balanced_seconds(ranks: Ranks) -> float:
    """Iteration when each rank has work that fits its speed: ``N / Σ 1/t_r``, the longest loader, communication."""
    speed = sum(1 / max(typical(windows, "own"), 1e-9) for windows in ranks)
    return len(ranks) / speed + max(typical(windows, "loader") for windows in ranks) + communication(ranks)


REMEDIES = {
    "data": "HeteroZeroPlugin gives each rank a batch that fits its speed (docs/data-parallel.md)",
    "tensor": "HeteroHybridParallelPlugin gives each rank columns that fit its speed (docs/tensor-parallel.md)",
    "pipeline": "`colossal-hetero profile` and `plan` give each stage layers that fit its device (docs/planning.md)",
    "memory": "a smaller micro-batch or a higher ZeRO stage uses less memory",
    "host": "fewer and larger operations (torch.compile, a larger micro-batch), or cores of its own",
    "loader": "more `num_workers` in its DataLoader, or less work for each sample",
    "network": "`colossal-hetero probe` and `plan` keep large messages off slow links (docs/planning.md)",
}


def diagnose(ranks: Ranks, parallelism: str = "data", links: Sequence[Link] | None = None) -> list[Finding]:
    """What is slow, the most expensive first; empty if nothing is. ``parallelism``, which the script seems to use, is
    ``data``, ``tensor`` or ``pipeline``; ``links`` that are None were not measured, and are not judged."""
    if len(ranks) < 2 or min(map(len, ranks)) < MIN_WINDOWS:
        return []
    wall = max(typical(windows, "wall") for windows in ranks)
    findings = [*_slow_work(ranks, wall, parallelism), *_slow_loaders(ranks, wall)]
    if links and needs_links(ranks):
        findings += _slow_links(links, wall, communication(ranks))
    return sorted(findings, key=lambda finding: -finding.seconds)


def _slow_work(ranks: Ranks, wall: float, parallelism: str) -> list[Finding]:
    by_cause: dict[str, dict[int, float]] = {}
    for rank, more in slow_ranks(ranks, "own").items():
        windows = ranks[rank]
        pressed = typical(windows, "faults") * FAULT_SECONDS > 0.2 * more or typical(windows, "retries") > 0.05
        late = 0 < typical(windows, "gpu_forward") <= 1.1 * typical(windows, "forward")  # then the GPU is idle
        by_cause.setdefault("memory" if pressed else "host" if late else "compute", {})[rank] = more
    findings = []
    for cause, slow in by_cause.items():
        worst, seconds = max(slow.items(), key=lambda each: each[1])
        predicted = min(balanced_seconds(ranks), wall) if cause == "compute" else wall - seconds
        remedy = REMEDIES[parallelism if cause == "compute" else cause]
        findings.append(Finding(cause, tuple(sorted(slow)), seconds, predicted, _why(cause, worst, ranks), remedy))
    return findings


def _why(cause: str, rank: int, ranks: Ranks) -> str:
    windows = ranks[rank]
    others = median(typical(each, "own") for each in ranks if each is not windows)
    why = f"its own work takes {_ms(typical(windows, 'own'))} per iteration, that of the others {_ms(others)}"
    shares = [typical(each, "cpu_share") for each in ranks]
    if cause == "memory":
        faults, retries = typical(windows, "faults"), typical(windows, "retries")
        return f"{why}; it reads {faults:.0f} pages from disk and retries {retries:.1f} allocations of GPU memory in it"
    if cause == "host":
        return f"{why}; its GPU is idle while the host launches operations"
    if not windows[-1].gpu and shares[rank] < 0.8 * max(shares):
        return f"{why}; it gets {shares[rank]:.0%} of a core: a CPU quota, or other programs on its core"
    forward, computed = typical(windows, "forward"), typical(windows, "forward_cpu")
    if not windows[-1].gpu and forward - computed - typical(windows, "delay") > 0.5 * forward:
        return f"{why}; its forward pass sleeps, or waits for something that is no collective"
    return f"{why}; it computes all the time: a slower or throttled device, or more work"


def _slow_loaders(ranks: Ranks, wall: float) -> list[Finding]:
    slow = slow_ranks(ranks, "loader")
    seconds = max(slow.values()) if slow else min(typical(windows, "loader") for windows in ranks)
    if not slow and seconds < 2 * MIN_SHARE * wall:
        return []
    longest = max(typical(windows, "loader") for windows in ranks)
    why = f"{'it' if slow else 'every rank'} waits {_ms(longest)} per iteration for its DataLoader"
    return [Finding("loader", tuple(sorted(slow)), seconds, wall - seconds, why, REMEDIES["loader"])]


def needs_links(ranks: Ranks) -> bool:
    """Whether communication takes long although nobody is late."""
    enough = min(map(len, ranks)) >= MIN_WINDOWS
    return enough and communication(ranks) >= 2 * MIN_SHARE * min(typical(windows, "wall") for windows in ranks)


def _slow_links(links: Sequence[Link], wall: float, spent: float) -> list[Finding]:
    """A rank whose links are all slower than those between the others, or a link slower than the others, or all."""
    alone = [(rank,) for rank in sorted({rank for link in links for rank in link.ranks})]
    for ranks in [*alone, *(link.ranks for link in links)]:
        own = [link for link in links if set(ranks) <= set(link.ranks)]
        others = [link for link in links if link not in own]
        if others:
            small, large = median(e.small_seconds for e in others), median(e.large_seconds for e in others)
            if all(e.small_seconds > max(5 * small, 1e-3) or e.large_seconds > 2 * large for e in own):
                return [_network(ranks, own, large, wall, spent)]
    all_are = median(link.large_seconds for link in links) > SLOW_MESSAGE_SECONDS
    return [_network((), links, 0.0, wall, spent)] if all_are else []


def _network(ranks: tuple[int, ...], own: Sequence[Link], usual: float, wall: float, spent: float) -> Finding:
    """The gain is at most the communication times the part of a message by which the link exceeds the others."""
    link = max(own, key=lambda e: e.large_seconds)
    gain = spent * max(1 - usual / link.large_seconds, 0.0)
    elsewhere = f", elsewhere {_ms(usual)}" if usual else ""
    why = (
        f"communication takes {_ms(spent)} of an iteration although nobody is late; between ranks "
        f"{link.ranks[0]} and {link.ranks[1]} 1 MB takes {_ms(link.large_seconds)}{elsewhere}"
    )
    return Finding("network", ranks, gain, wall - gain, why, REMEDIES["network"])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def advice(findings: Sequence[Finding], wall: float) -> list[str]:
    """The findings in words."""
    said = []
    for each in findings:
        who = f"Rank {each.ranks[0]} is" if len(each.ranks) == 1 else f"Ranks {', '.join(map(str, each.ranks))} are"
        said.append(
            f"{who if each.ranks else 'All ranks are'} slow: {each.cause}. It costs {_ms(each.seconds)} of each "
            f"iteration of {_ms(wall)} ({each.seconds / wall:.0%}): {each.why}. What would help: {each.remedy}; "
            f"predicted: {_ms(each.predicted_seconds)} per iteration, {1 - each.predicted_seconds / wall:.0%} less."
        )
    return said or ["No rank is slower than the others by more than noise."]


# Effects: clocks, hooks, the store ------------------------------------------------------------------------------------

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "_all_gather_base", "all_reduce", "all_to_all", "all_to_all_single"),
    *("all_gather_single", "reduce_scatter_single"),  # torch 2.14's names of two of them
    *("barrier", "batch_isend_irecv", "broadcast", "_broadcast_coalesced", "gather", "recv", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base", "scatter", "send"),
)
WARMUP = 5  # iterations before those whose duration sets how often to measure
SAMPLE_SECONDS, WINDOW_SECONDS = 0.1, 1.0  # from one measured iteration to the next, and of a window
MAX_WINDOWS, MAX_ROUNDS = 120, 15  # a rank keeps so many windows, and measures links to so many others
LARGE_BYTES, TRIPS = 1 << 20, 5
LAST_WAIT_SECONDS = 5.0  # for the last windows of other ranks, at the end of rank 0


class Recorder:
    """Measures this rank, and on rank 0 collects, judges and reports. No collective of the script's groups is used."""

    def __init__(self, after: float, json_path: Path | None) -> None:
        self.after, self.json_path = after, json_path
        self.thread, self.process = threading.get_ident(), os.getpid()
        self.store: Any = None
        self.optimizer: Callable[[], Any] = lambda: None
        self.other_steps: Counter[int] = Counter()
        self.hooks: list[Any] = []
        self.is_off, self.beginnings = False, 0
        self.schedule: tuple[int, int, int] | None = None  # iterations between samples, of a window, first iteration
        self._restart()

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin anew with the iterations of this optimizer, at the same step on all ranks."""
        self.optimizer = weakref.ref(optimizer)
        self.beginnings += 1
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(f"colossal_hetero.doctor/{self.beginnings}", store)
        self._measure_forward(False)
        self.iteration, self.schedule = 0, None
        self.ends: list[float] = []
        self.windows: deque[str] = deque(maxlen=MAX_WINDOWS)  # as JSON, which takes long to write
        self.samples: list[tuple[dict[str, float], list[Any]]] = []
        self.calls: set[tuple[str, str]] = set()
        self.probe_at: int | None = None
        self.reported, self.look_after = False, self.after / 2  # seconds until rank 0 looks at communication

    def _restart(self) -> None:
        self.stack, self.depth = ["rest"], 0
        self.times = {phase: [0.0, 0.0] for phase in ("rest", "forward", "loader", "wait")}
        self.events: list[Any] = []
        self.counters = _counters() if self.hooks else {}
        self.last = self.started = (time.perf_counter(), time.thread_time())

    def _charge(self) -> None:
        now = (time.perf_counter(), time.thread_time())
        spent = self.times[self.stack[-1]]
        spent[0] += now[0] - self.last[0]
        spent[1] += now[1] - self.last[1]
        self.last = now

    def enter(self, phase: str, name: str = "") -> bool:
        if self.is_off or not self.hooks or self.stack[-1] == phase or threading.get_ident() != self.thread:
            return False  # most iterations are not measured, and take no time here
        self._charge()
        if phase == "wait":
            self.calls.add((self.stack[-1], name))
        self.stack.append(phase)
        return True

    def leave(self) -> None:
        self._charge()
        if len(self.stack) > 1:
            self.stack.pop()

    def timed(self, phase: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            entered = self.enter(phase, function.__name__)
            try:
                return function(*args, **kwargs)
            finally:
                if entered:
                    self.leave()

        return call

    def _before(self, module: torch.nn.Module, _: Any) -> None:
        if threading.get_ident() != self.thread:
            return
        if self.depth == 0:
            self.enter("forward")
        self.depth += 1
        if not module._modules and torch.cuda.is_initialized():
            _record(self.events)

    def _after(self, module: torch.nn.Module, *_: Any) -> None:
        if threading.get_ident() != self.thread or self.depth == 0:
            return
        if len(self.events) % 2 and not module._modules:
            _record(self.events)
        self.depth -= 1
        if self.depth == 0:
            self.leave()

    def _measure_forward(self, wanted: bool) -> None:
        if wanted and not self.hooks:
            after = register_module_forward_hook(self._after, always_call=True)
            self.hooks = [register_module_forward_pre_hook(self._before), after]
        while self.hooks and not wanted:
            self.hooks.pop().remove()

    def tick(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called after each step of each optimizer. Those of the one that steps most often are the iterations."""
        if self.is_off or threading.get_ident() != self.thread or not dist.is_initialized():
            return
        try:
            if self.optimizer() is not optimizer:
                self.other_steps[id(optimizer)] += 1
                if self.optimizer() is not None and self.other_steps[id(optimizer)] < 3:
                    return
                self._begin(optimizer)
            self.other_steps.clear()
            self._count()
        except Exception as error:  # the script's training does not depend on this module
            self.is_off = True
            self._measure_forward(False)
            print(f"colossal_hetero.doctor stops measuring: {error!r}", file=sys.stderr)
        self._restart()

    def _count(self) -> None:
        self._charge()
        self.iteration += 1
        if self.schedule is None:
            self._agree()
            return
        stride, length, first = self.schedule
        if self.hooks:
            self._sample(length)
        if self.iteration > first and self.iteration % length == 0:
            self._close_window(length)
        self._measure_forward(self.iteration >= first and self.iteration % stride == 0)

    def _agree(self) -> None:
        self.ends.append(time.perf_counter())
        later = self.ends[WARMUP:]
        if self.rank == 0 and len(later) > 1 and later[-1] - later[0] >= WINDOW_SECONDS:  # many periods of a CPU quota
            seconds = (later[-1] - later[0]) / (len(later) - 1)
            stride = max(1, round(SAMPLE_SECONDS / seconds))
            length = stride * max(1, round(WINDOW_SECONDS / seconds / stride))
            self._set("schedule", (stride, length, self.iteration + 2))
        self.schedule = self._get("schedule")

    def _sample(self, length: int) -> None:
        rest, forward, loader, _ = self.times.values()
        sample = {name: value - self.counters[name] for name, value in _counters().items()}
        sample |= {"number": (self.iteration - 1) // length, "wall": self.last[0] - self.started[0]}
        sample |= {"forward": forward[0], "forward_cpu": forward[1], "rest_cpu": rest[1], "loader": loader[0]}
        self.samples.append((sample, self.events))

    def _close_window(self, length: int) -> None:
        """Once a second: tell this rank's windows, and see what the others tell."""
        if all(events[-1].query() for _, events in self.samples if events):  # nothing waits for a GPU
            samples = [sample | _gpu_seconds(events) for sample, events in self.samples]
            if samples:
                self.windows.append(json.dumps({n: sum(s[n] for s in samples) / len(samples) for n in samples[0]}))
            self.samples = []
        self.store.set(f"windows/{self.rank}", f"[{','.join(self.windows)}]")
        self.probe_at = self.probe_at or self._get("probe_at")
        if self.iteration == self.probe_at:
            self._set(f"links/{self.rank}", self._measure_links())
        passed = time.perf_counter() - self.ends[0] if self.rank == 0 else 0.0
        if self.probe_at is None and passed > self.look_after:
            self.look_after *= 2
            if needs_links(self._all_windows()):
                self._set("probe_at", self.iteration + 2 * length)
        if not self.reported and passed > self.after:
            self.reported = True
            self.report()

    def _set(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def _get(self, key: str, default: Any = None) -> Any:
        return json.loads(self.store.get(key)) if self.store.check([key]) else default

    def _all_windows(self) -> list[list[Window]]:
        return [[Window(**each) for each in self._get(f"windows/{rank}", [])] for rank in range(self.world_size)]

    def _measure_links(self) -> list[tuple[tuple[int, int], float, float]]:
        """Links to ranks of higher number. In each round every rank has one partner, over a group of their own."""
        store, timeout = dist.PrefixStore("links", self.store), timedelta(seconds=20)
        on_gpu = "nccl" in dist.get_backend()
        kind: Any = dist.ProcessGroupNCCL if on_gpu else dist.ProcessGroupGloo
        group = kind(store, self.rank, self.world_size, timeout)
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        measured = []
        for round_ in range(1, min(1 << (self.world_size - 1).bit_length(), MAX_ROUNDS + 1)):
            partner = self.rank ^ round_
            if partner < self.world_size:
                small, large = (_trip_seconds(group, self.rank, partner, size, device) for size in (1, LARGE_BYTES))
                measured.append(((self.rank, partner), small, large))
        return [each for each in measured if each[0][0] < each[0][1]]

    def report(self) -> None:
        ranks = self._all_windows()
        told = [link for rank in range(self.world_size) for link in self._get(f"links/{rank}", [])]
        links = [Link(tuple(ranks), *seconds) for ranks, *seconds in told]
        if min(map(len, ranks)) < MIN_WINDOWS:
            print("colossal_hetero.doctor: too few iterations to judge.", file=sys.stderr)
            return
        findings = diagnose(ranks, self._parallelism(), links)
        wall = max(typical(windows, "wall") for windows in ranks)
        show(ranks, advice(findings, wall))
        if self.json_path is not None:
            parts = {"findings": findings, "links": links, "ranks": ranks, "iteration_seconds": wall}
            self.json_path.write_text(json.dumps(parts, default=asdict), encoding="utf-8")

    def _parallelism(self) -> str:
        names = {name for _, name in self.calls}
        sends = names & {"batch_isend_irecv", "send", "recv"}
        return "pipeline" if sends else "tensor" if ("forward", "all_reduce") in self.calls else "data"

    def finish(self) -> None:
        """The last report, when the interpreter exits. A rank that is gone is not waited for for long."""
        if self.store is None or os.getpid() != self.process:
            return
        self.is_off = True
        with suppress(Exception):
            self._set(f"done/{self.rank}", True)
            if self.rank == 0 and self.schedule is not None:
                wait = timedelta(seconds=0.05 if hasattr(sys, "last_value") else LAST_WAIT_SECONDS)
                with suppress(RuntimeError):
                    self.store.wait([f"done/{rank}" for rank in range(self.world_size)], wait)
                self.report()


def _counters() -> dict[str, float]:
    counted: dict[str, float] = {"faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt}
    with suppress(OSError, IndexError):
        counted["delay"] = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    if torch.cuda.is_initialized():
        counted["retries"] = torch.cuda.memory_stats_as_nested_dict().get("num_alloc_retries", 0)
    return counted


def _record(events: list[Any]) -> None:
    if not torch.cuda.is_current_stream_capturing():
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()


def _gpu_seconds(events: list[Any]) -> dict[str, float]:
    inside = sum(start.elapsed_time(end) for start, end in zip(events[::2], events[1::2], strict=False)) / 1e3
    return {"gpu": inside, "gpu_forward": events[0].elapsed_time(events[-1]) / 1e3 if len(events) > 1 else 0.0}


def _trip_seconds(group: Any, rank: int, partner: int, size: int, device: torch.device) -> float:
    """Seconds in one direction: half of the shortest round trip, which other programs disturb least."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(TRIPS + 1):  # the first one connects, and waits for a GPU
        start = time.perf_counter()
        for move in (group.send, group.recv) if rank < partner else (group.recv, group.send):
            move([message], partner, 0).wait()
        _ = message[0].item()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:]) / 2


def show(ranks: Ranks, sentences: Sequence[str]) -> None:
    columns = map(number_column, ("rank", "iteration", "forward", "other work", "loader", "communication", "CPU share"))
    lines = []
    for rank, windows in enumerate(ranks):
        own, gpu = typical(windows, "own"), typical(windows, "gpu")
        forward = gpu or typical(windows, "forward")
        rest = max(own - forward, 0.0), typical(windows, "loader"), typical(windows, "wait")
        cells = [f"{seconds * 1e3:.1f}" for seconds in (typical(windows, "wall"), forward, *rest)]
        lines.append([str(rank), *cells, "" if gpu else f"{typical(windows, 'cpu_share'):.0%}"])
    console = Console(file=sys.stderr, width=80)
    console.print(make_table([*columns], lines, title="colossal_hetero.doctor: milliseconds per iteration"))
    for sentence in sentences:
        console.print(sentence, highlight=False, markup=False)


def watch(after: float = 60.0, json_path: str | Path | None = None) -> None:
    """Watch this process from now on; a second call does nothing.

    Args:
        after: seconds from the first iteration to the first report; another one comes at the end.
        json_path: a file that rank 0 writes at each report, with the findings and the numbers behind them.
    """
    if _watched:
        return
    recorder = Recorder(after, None if json_path is None else Path(json_path))
    _watched.append(recorder)
    for name in COLLECTIVES:
        for module in (dist, dist.distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, recorder.timed("wait", getattr(module, name)))
    dist.Work.wait = recorder.timed("wait", dist.Work.wait)  # type: ignore[method-assign]
    base: Any = dataloader._BaseDataLoaderIter
    base.__next__ = recorder.timed("loader", base.__next__)
    register_optimizer_step_post_hook(recorder.tick)
    atexit.register(recorder.finish)


_watched: list[Recorder] = []


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script as ``python SCRIPT ARGUMENTS`` would, and watch it."""
    parser = argparse.ArgumentParser(prog="python -m colossal_hetero.doctor", description=__doc__.splitlines()[0])
    parser.add_argument("--after", type=float, default=60.0, help="seconds until the first report [60]")
    parser.add_argument("--json", type=Path, help="also write the findings to this file")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args(arguments)
    watch(options.after, options.json)
    sys.argv = [options.script, *options.arguments]
    path = os.path.abspath(options.script)
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    # Not runpy.run_path, which takes the module away before functions that run at exit use it.
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=options.script, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), options.script, "exec"), module.__dict__)


if __name__ == "__main__":
    import_module("colossal_hetero.doctor").main()  # one copy, which scripts import too
