"""The cost of balancing on GPUs of which none is slow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.gpu.part import Case, Machine, Part, Row
from benchmarks.gpu.ranks import run_ranks
from benchmarks.gpu.vit_training import Shape, VitTraining, shape_for
from colossal_hetero import BalanceConfig

VARIANTS = {
    "Colossal-AI": None,
    "Colossal-AI (control)": None,
    "off": BalanceConfig(mode="off"),
    "auto": BalanceConfig(mode="auto"),
}

SHAPES = {
    "launch-bound": Shape(width=512, depth=24, heads=8, image=64, patch=16, batch=4),
    "GPU-bound": Shape(width=2048, depth=8, heads=16, image=224, patch=16, batch=32),
}


def take_turns(device: torch.device, shape: Shape, rounds: int) -> list[tuple[str, float, float, float]]:
    """Of each variant: milliseconds of an iteration, the ratio to the first one in the same turn, migrated share."""
    trainings = {name: VitTraining(device, shape, balance) for name, balance in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for number in range(rounds + 12):
        for name, training in trainings.items():
            dist.barrier()
            taken = training.iterate()
            if number >= 12:
                seconds[name].append(taken)
    first = seconds[next(iter(seconds))]
    found = []
    for name, training in trainings.items():
        ratio = median(own / other for own, other in zip(seconds[name], first, strict=True))
        plan = None if VARIANTS[name] is None else training.plugin.balancer.plan
        found.append((name, 1e3 * median(seconds[name]), ratio, 0.0 if plan is None else sum(plan.migrate)))
    return found


def nobody_slow(machine: Machine, shape: Shape, rounds: int) -> list[Row]:
    outcomes = run_ranks(machine, 2, take_turns, shape, rounds, seconds=420)[0]
    return [
        (f"{milliseconds:.2f}", f"{ratio:.4f}", name, f"{moved:.0%}") for name, milliseconds, ratio, moved in outcomes
    ]


def cases(machine: Machine) -> Sequence[Case]:
    rounds = 3 if machine.is_tiny else 100
    return [
        Case(name, partial(nobody_slow, machine, shape_for(machine, shape), rounds), 8 * 2**30)
        for name, shape in SHAPES.items()
    ]


PART = Part(
    name="idle",
    about="""
*Nobody slow*: two ranks train a ViT; Colossal-AI's plugin, a second one as the control, and this package's in modes
"off" and "auto" take turns, iteration by iteration. Columns: the median time of an iteration, and the median of its
ratios to the first variant in the same turn. Aim: 1.005. *Launch-bound*: the GPU waits for the host, so that each
operation of the host counts; nothing must migrate, because the GPUs are not slow. *GPU-bound*: the host is ahead. Ranks
that share one GPU communicate through the host, and wait for each other's kernels; only the ratio is of interest then.
""",
    columns=("case", "iteration [ms]", "ratio", "variant", "migrated"),
    cases=cases,
)
