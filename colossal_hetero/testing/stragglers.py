"""Stragglers on demand: make chosen ranks' products slower, for experiments. Only the layers' ``slow_down`` functions
do so; the code that measures and decides has to detect them as it detects a slow device."""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

Schedule = Literal["constant", "round-robin", "random"]
Period = Literal["iteration", "epoch"]


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Ranks that are slowed down, by which factor, and when."""

    slowdowns: Mapping[int, float]
    """Factor χ ≥ 1 by global rank: each product is computed χ times, so that a resized layer is slowed by less."""
    schedule: Schedule = "constant"
    """``constant``: always the given ranks. In each period, ``round-robin`` moves every factor to the next rank, and
    ``random`` gives the factors to newly drawn ranks."""
    period: Period = "epoch"
    seed: int = 0
    """Seed of the ``random`` schedule; the same on all ranks."""
    world_size: int = field(default=0)
    """Number of ranks; 0: that of ``torch.distributed``."""

    def __post_init__(self) -> None:
        world = self.world_size or dist.get_world_size()
        object.__setattr__(self, "world_size", world)
        for rank, slowdown in self.slowdowns.items():
            if not 0 <= rank < world:
                raise ValueError(f"straggler rank {rank} does not exist; there are {world} ranks, 0 to {world - 1}")
            if not 1.0 <= slowdown < math.inf:
                raise ValueError(
                    f"slowdown {slowdown} of rank {rank} must be a number of at least 1 (1 means not slowed down)"
                )
        for name, kinds in (("schedule", Schedule), ("period", Period)):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; valid are {', '.join(get_args(kinds))}")

    def slowdown(self, rank: int, period: int) -> float:
        """Factor χ of ``rank`` in the period with this number, from 0 on."""
        if self.schedule == "constant":
            return self.slowdowns.get(rank, 1.0)
        if self.schedule == "round-robin":
            return self.slowdowns.get((rank - period) % self.world_size, 1.0)
        places = np.random.default_rng([self.seed, period]).permutation(self.world_size)[: len(self.slowdowns)]
        chosen = dict(zip(places.tolist(), self.slowdowns.values(), strict=True))
        return chosen.get(rank, 1.0)


class _RepeatSlowdown:
    """Computes a product ``factor`` times; the fractional part of the factor is carried over to the next product."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._debt = 0.0

    def __call__(self, product: Callable[[], Tensor]) -> Tensor:
        result = product()
        self._debt += self.factor - 1.0
        while self._debt >= 1.0:
            product()
            self._debt -= 1.0
        return result


def inject_stragglers(
    model: nn.Module, optimizer: Any, stragglers: Stragglers, iterations_per_epoch: int | None = None
) -> None:
    """Slow this process's tensor-parallel products down as ``stragglers`` says, from now on.

    Args:
        model: the boosted model.
        optimizer: its optimizer; each of its steps ends an iteration.
        stragglers: ranks that are slowed down, and when.
        iterations_per_epoch: required if the schedule changes every epoch.

    Raises:
        ValueError: ``iterations_per_epoch`` is missing, or the model has no layers that can be slowed down.
    """
    # Imported here, so that a command line can be checked without waiting for Colossal-AI to load.
    from ..layers.linear import hetero_layers

    if stragglers.schedule != "constant" and stragglers.period == "epoch" and not iterations_per_epoch:
        raise ValueError(f"a {stragglers.schedule} schedule that changes every epoch needs iterations_per_epoch")
    layers = hetero_layers(model)
    if not layers:
        raise ValueError(
            "the model has no tensor-parallel layers of colossal_hetero, so no products can be slowed down"
        )
    slow_down = _RepeatSlowdown()
    rank = dist.get_rank()
    length = iterations_per_epoch if stragglers.period == "epoch" and iterations_per_epoch else 1
    iterations = 0
    slow_down.factor = stragglers.slowdown(rank, 0)
    for layer in layers.values():
        layer.slow_down = slow_down

    step = optimizer.step

    @functools.wraps(step)
    def step_and_count(*args: Any, **kwargs: Any) -> Any:
        nonlocal iterations
        result = step(*args, **kwargs)
        iterations += 1
        slow_down.factor = stragglers.slowdown(rank, iterations // length)
        return result

    optimizer.step = step_and_count


class _BeforeBackward(torch.autograd.Function):
    """The identity, whose backward pass calls ``action`` with the gradient first."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, action: Any) -> Tensor:
        ctx.action = action
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.action(gradient)
        return gradient, None


def repeat_passes(model: nn.Module, times: int) -> None:
    """Run every forward and backward pass of ``model`` in training ``times`` times from now on. More passes run in a
    copy outside of the model, whose gradients, hooks and sharded memory stay the same; it needs the memory of a pass.
    """
    if times == 1:
        return
    twin = copy.deepcopy(model)

    def run_again(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        if not (module.training and torch.is_grad_enabled()):
            return None
        first = inputs[0].detach()
        twin.to(first)  # the device and the precision that a plugin has chosen
        parameters = list(twin.parameters())
        for _ in range(times - 2):
            twin(first)
        again = twin(first)

        def backward_again(gradient: Tensor) -> None:
            for left in reversed(range(times - 1)):
                torch.autograd.grad(again, parameters, gradient.to(again.dtype), retain_graph=left > 0)

        return _BeforeBackward.apply(output, backward_again)

    model.register_forward_hook(run_again)


CGROUPS = Path("/sys/fs/cgroup")
PREFIX = "colossal_hetero_"


@contextmanager
def cpu_quota(share: float, period_us: int = 100_000) -> Iterator[None]:
    """Limit all threads of this process together to ``share`` of one core, without changing the process itself.

    Args:
        share: at least 0.001; 0.25 is a quarter of one core.
        period_us: period in microseconds, 1,000 to 1,000,000, in which the process stops once its share is used up. It
            is longer where the share of it would be below 1,000, which the kernel does not take.

    Raises:
        OSError: the kernel has no CPU control groups, or this user may not create one.
        ValueError: the share is below 0.001, or the period is impossible.
    """
    root = CGROUPS / "cpu"
    quota_us, period_us = quota_and_period(share, period_us)
    if root.is_dir():
        settings = {"cpu.cfs_period_us": str(period_us), "cpu.cfs_quota_us": str(quota_us)}
    else:
        root, settings = CGROUPS, {"cpu.max": f"{quota_us} {period_us}"}
    _remove_abandoned(root)
    group = root / f"{PREFIX}{os.getpid()}"
    group.mkdir()
    try:
        for file, value in settings.items():
            (group / file).write_text(value)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def quota_and_period(share: float, period_us: int) -> tuple[int, int]:
    """CPU time per period and the period, in microseconds, for a ``share`` of one core."""
    if not share >= 0.001:
        raise ValueError(f"share={share} is too little: the kernel takes 1 ms of CPU time per 1 s at least; give 0.001")
    if not 1_000 <= period_us <= 1_000_000:
        raise ValueError(f"period_us={period_us} must be 1,000 to 1,000,000 microseconds")
    period_us = max(period_us, math.ceil(1_000 / share))
    return int(share * period_us + 1e-6), period_us


def _remove_abandoned(root: Path) -> None:
    for group in root.glob(f"{PREFIX}*"):
        if not Path("/proc", group.name.removeprefix(PREFIX)).exists():
            with suppress(OSError):
                group.rmdir()
