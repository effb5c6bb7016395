"""Time of a training iteration in mode "off" relative to one with Colossal-AI's layers, and time of a clock's marks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from colossal_hetero import BalanceConfig
from colossal_hetero.balance.attach import attach_balancer
from colossal_hetero.balance.balancer import ALWAYS_MEASURED
from colossal_hetero.balance.clock import make_clock
from colossal_hetero.colossalai_support.accelerator import get_accelerator
from colossal_hetero.layers import TimmViTPolicy, hetero_layers, hetero_policy

from ..part import Row
from ..timing import seconds_in_turns
from .vit_shard import VitShard, with_parallel_layers

__all__ = ["off_rows"]

LIMIT = 1.01
THEIRS, CONTROL, OFF = "Colossal-AI's layers", "a second such model", "off"


def off_rows(device: torch.device, shard: VitShard, images: int, rounds: int) -> list[Row]:
    """What is compared, the ratio or the time, the aim, and a note. Runs on a rank that is alone."""
    dtype = torch.bfloat16
    x, labels = shard.batch(images, device, dtype)

    def passes(model: nn.Module) -> None:
        F.cross_entropy(model(x).float(), labels).backward()

    def plain() -> Callable[[], None]:
        model = with_parallel_layers(shard.build(device, dtype), TimmViTPolicy())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def iterate() -> None:
            passes(model)
            optimizer.step()
            optimizer.zero_grad()

        return iterate

    whole = shard.build(device, dtype)
    model = with_parallel_layers(whole, hetero_policy(whole))
    marks = _marks_of_a_layer(model, passes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    group = dist.group.WORLD
    balancer = attach_balancer(model, BalanceConfig(mode="off"), make_clock(device), group, 100)  # type: ignore[arg-type]

    def off() -> None:
        balancer.begin()
        passes(model)
        balancer.before_step()
        optimizer.step()
        balancer.tick()
        optimizer.zero_grad()

    runs = {THEIRS: plain(), CONTROL: plain(), OFF: off}
    seconds = seconds_in_turns(runs, device, rounds=rounds, warmup=ALWAYS_MEASURED + 2, calls=3)
    of_mark = _seconds_of_mark(device)
    rows: list[Row] = [
        (f"{name} / {THEIRS}", seconds[name] / seconds[THEIRS], aim, f"{1e3 * seconds[name]:.2f} ms")
        for name, aim in ((OFF, LIMIT), (CONTROL, ""))
    ]
    rows.append(("marks of a layer [µs]", 1e6 * marks * of_mark, "", f"{marks:g} marks of {1e6 * of_mark:.2f} µs"))
    return rows


class _CountingClock:
    """Counts marks that take an event on a GPU."""

    def __init__(self) -> None:
        self.marks = 0

    def mark(self, part: str, kind: int | None = None, inner: bool = False) -> None:
        self.marks += not inner


def _marks_of_a_layer(model: nn.Module, passes: Callable[[nn.Module], None]) -> float:
    """How often a layer marks the clock in an iteration."""
    layers, clock = list(hetero_layers(model).values()), _CountingClock()
    for layer in layers:
        layer.clock = clock
    passes(model)
    for layer in layers:
        layer.clock = None
    model.zero_grad()
    return clock.marks / len(layers)


def _seconds_of_mark(device: torch.device, marks: int = 1000) -> float:
    """Host seconds of a mark, while the device has nothing to do."""
    clock = make_clock(device)
    seconds = 0.0
    # The second time a clock of a GPU has its events already, as in training.
    for _ in range(2):
        clock.start()
        begin = time.perf_counter()
        for _ in range(marks):
            clock.mark("matmul", 0)
        seconds = (time.perf_counter() - begin) / marks
        clock.stop()
        get_accelerator().synchronize()
        clock.read()
    return seconds
