"""The cost of balancing on GPUs of which none is slow, and a slow host beside a slow GPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.common import take_turns
from benchmarks.gpu.part import Case, Machine, Part, Row
from benchmarks.gpu.ranks import run_ranks
from benchmarks.gpu.vit_training import Shape, VitTraining, shape_for
from colossal_hetero import BalanceConfig

GIB = 2**30
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


def in_turns(device: torch.device, shape: Shape, rounds: int) -> list[tuple[str, float, float, float]]:
    """Of each variant: milliseconds of an iteration, the ratio to the first one in the same turn, migrated share."""
    trainings = {name: VitTraining(device, shape, balance) for name, balance in VARIANTS.items()}
    take_turns(list(trainings.values()), warmup=12, rounds=rounds, block=1)
    first = trainings["Colossal-AI"].seconds
    found = []
    for name, training in trainings.items():
        ratio = median(own / other for own, other in zip(training.seconds, first, strict=True))
        plan = None if VARIANTS[name] is None else training.plugin.balancer.plan
        found.append((name, 1e3 * training.median_seconds, ratio, 0.0 if plan is None else sum(plan.migrate)))
    return found


@contextmanager
def slow_host() -> Iterator[None]:
    """In the block, another thread of this process takes Python's lock half of the time."""
    ended, interval = threading.Event(), sys.getswitchinterval()

    def compute() -> None:
        while not ended.is_set():
            sum(range(100))

    thread = threading.Thread(target=compute)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)


def one_slow(
    device: torch.device, shape: Shape, repeats: int, what: str, iterations: int
) -> list[tuple[str, float, float, float]]:
    """As :func:`in_turns`, of "off" and "auto", while the last rank is slow: its host, or its GPU."""
    slowest = dist.get_world_size() - 1
    of_gpu = {slowest: float(repeats)} if what == "GPU" else {}
    is_host = what == "host" and dist.get_rank() == slowest
    found: list[tuple[str, float, float, float]] = []
    for name in ("off", "auto"):
        training = VitTraining(device, shape, VARIANTS[name], of_gpu)
        with slow_host() if is_host else nullcontext():
            seconds = [training.iterate() for _ in range(iterations)]
        plan = training.plugin.balancer.plan
        moved = 0.0 if plan is None else sum(plan.migrate)
        taken = median(seconds[iterations // 2 :])
        found.append((f"{name}, slow {what}", 1e3 * taken, 1e3 * taken / found[0][1] if found else 1.0, moved))
    return found


def slow_rank(machine: Machine, shape: Shape, repeats: int, what: str, iterations: int) -> list[Row]:
    return _rows(run_ranks(machine, 2, one_slow, shape, repeats, what, iterations, seconds=420)[0])


def nobody_slow(machine: Machine, shape: Shape, rounds: int) -> list[Row]:
    return _rows(run_ranks(machine, 2, in_turns, shape, rounds, seconds=420)[0])


def _rows(outcomes: list[tuple[str, float, float, float]]) -> list[Row]:
    return [
        (f"{milliseconds:.2f}", f"{ratio:.4f}", name, f"{moved:.0%}") for name, milliseconds, ratio, moved in outcomes
    ]


def cases(machine: Machine) -> Sequence[Case]:
    rounds, iterations, gpus = (3, 4, 0) if machine.is_tiny else (50, 120, 2)
    bound_by_launches = shape_for(machine, SHAPES["launch-bound"])
    bound_by_gpu = shape_for(machine, SHAPES["GPU-bound"])
    slow = partial(slow_rank, machine)
    return [
        *(
            Case(name, partial(nobody_slow, machine, shape_for(machine, shape), rounds), 8 * GIB)
            for name, shape in SHAPES.items()
        ),
        Case("a slow host", partial(slow, bound_by_launches, 1, "host", iterations), 8 * GIB, gpus=gpus),
        Case("a slow GPU", partial(slow, bound_by_gpu, 4, "GPU", iterations), 8 * GIB, gpus=gpus),
    ]


PART = Part(
    name="idle",
    about="""
*Nobody slow*: two ranks train a ViT; Colossal-AI's plugin, a second one as the control, and this package's in modes
"off" and "auto" take turns, iteration by iteration. Columns: the median time of an iteration, and the median of its
ratios to the first variant in the same turn. Aim: 1.005. *Launch-bound*: the GPU waits for the host, so that each
operation of the host counts; nothing must migrate, because the GPUs are not slow. *GPU-bound*: the host is ahead. Ranks
that share one GPU communicate through the host, and wait for each other's kernels; only the ratio is of interest then.

*A slow host*: a second thread of rank 1 takes Python's lock again and again, so that its GPU waits for work. Nothing
must migrate, and rank 1 prints that its GPU waits for the host; aim: as "off". *A slow GPU*: rank 1 computes each
product four times. Now work must migrate. Ratios are those to "off", which trains before.
""",
    columns=("case", "iteration [ms]", "ratio", "variant", "migrated"),
    cases=cases,
)
