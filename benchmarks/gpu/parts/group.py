"""A tensor-parallel group on one GPU with a straggler, in every mode."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.common import take_turns
from benchmarks.gpu.part import Case, Machine, Part, Row
from benchmarks.gpu.ranks import run_ranks
from benchmarks.gpu.vit_training import Shape, VitTraining, shape_for
from colossal_hetero import BalanceConfig
from colossal_hetero.balance.report import IterationRecord, ideal_ratio, report

GIB = 2**30
STRAGGLER = 1
NO_STRAGGLER = "off, no straggler"
BUSY_SECONDS = 240


@dataclass(frozen=True)
class Amount:
    """How much is measured."""

    repeats: int
    """How often every rank computes each product. On GPUs that are this many times slower, products rather than Gloo's
    copies take most of the time."""
    warmup: int
    rounds: int
    block: int
    """Iterations that a variant is timed in each round."""
    measures_costs: bool


@dataclass(frozen=True)
class Outcome:
    """What a variant's training took on rank 0."""

    name: str
    seconds: float
    """Median of an iteration."""
    resized: float
    migrated: float
    """Shares of the straggler's work."""
    loss: float
    """Of the last iteration; all variants train equally many."""
    products: float
    """Seconds of the products of an iteration, on the slowest rank."""
    measured_bound: float
    """Seconds of an iteration if the work were divided optimally, from the measured times of the ranks."""
    note: str


def train(
    device: torch.device, shape: Shape, amount: Amount, variants: Mapping[str, Mapping[int, float]]
) -> list[Outcome]:
    """Train all variants in turns, on all ranks; ``variants`` has the slowdowns by name, which begins with the mode."""
    trainings = {
        name: VitTraining(
            device,
            shape,
            BalanceConfig(mode=name.split(",")[0], measure_costs=amount.measures_costs),  # type: ignore[arg-type]
            {rank: amount.repeats * slowdowns.get(rank, 1.0) for rank in range(dist.get_world_size())},
        )
        for name, slowdowns in variants.items()
    }
    take_turns(list(trainings.values()), amount.warmup, amount.rounds, amount.block)
    outcomes = []
    for name, training in trainings.items():
        records = training.plugin.balancer.collect() or []
        outcomes.append(_outcome(name, training.median_seconds, training.losses[-1], records[amount.warmup // 2 :]))
    return outcomes


def _outcome(name: str, seconds: float, loss: float, records: Sequence[IterationRecord]) -> Outcome:
    """The records are those of rank 0; other ranks have none."""
    summary = report(records, range(len(records[0].ranks))) if records else None
    if summary is None:
        return Outcome(name, seconds, 0.0, 0.0, loss, 0.0, 0.0, "")
    straggler = records[-1].ranks[STRAGGLER]
    products = median(max(rank.matmul_seconds for rank in record.ranks) for record in records)
    return Outcome(
        name, seconds, straggler.resized, straggler.migrated, loss, products, summary.bound_seconds, records[-1].note
    )


def repeated(machine: Machine, shape: Shape, amount: Amount, slowdown: float) -> list[Row]:
    """Rank 1 computes each product ``slowdown`` times."""
    slow = {STRAGGLER: slowdown}
    variants = {NO_STRAGGLER: {}, "off": slow, "resize": slow, "semi": slow, "auto": slow}
    outcomes = run_ranks(machine, 2, train, shape, amount, variants)[0]
    base = outcomes[0]
    bound = base.seconds - base.products + ideal_ratio(slow, 2) * base.products
    return [_row(outcome, base.seconds, bound) for outcome in outcomes]


def busy_gpu(machine: Machine, shape: Shape, amount: Amount) -> list[Row]:
    """Another process computes on the GPU of rank 1."""
    busy_device = f"cuda:{STRAGGLER if machine.gpus > 1 else 0}" if machine.gpus else "cpu"
    outcomes = run_ranks(machine, 2, train_disturbed, shape, amount, busy_device)[0]
    return [_row(outcome, outcomes[0].seconds, outcomes[1].measured_bound) for outcome in outcomes]


def train_disturbed(device: torch.device, shape: Shape, amount: Amount, busy_device: str) -> list[Outcome]:
    """Train alone, then while another process keeps ``busy_device`` busy."""
    alone = train(device, shape, amount, {NO_STRAGGLER: {}})
    with _busy_process(busy_device) if dist.get_rank() == 0 else nullcontext():
        dist.barrier()
        disturbed = train(device, shape, amount, {"off": {}, "auto": {}})
        dist.barrier()
    return alone + disturbed


@contextmanager
def _busy_process(device: str) -> Iterator[None]:
    """In the block, a process computes on ``device``. It ends in any case after :data:`BUSY_SECONDS`."""
    begin, work = "", "pass"
    if device != "cpu":
        begin = f"import torch; a = torch.ones(4096, 4096, device={device!r}); (a @ a).sum().item()"
        work = "(a @ a).sum().item()"
    lines = ["import time", begin, "print(flush=True)", f"end = time.monotonic() + {BUSY_SECONDS}"]
    lines.append(f"while time.monotonic() < end: {work}")
    process = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _row(outcome: Outcome, base: float, bound: float) -> Row:
    return (
        outcome.name,
        f"{outcome.seconds * 1e3:.1f}",
        f"{outcome.seconds / base:.2f}",
        f"{outcome.seconds / bound:.3f}" if bound > 0 else "",
        f"{outcome.resized:.0%}",
        f"{outcome.migrated:.0%}",
        f"{outcome.loss:.5f}",
        outcome.note,
    )


# The part ------------------------------------------------------------------------------------------------------------


def cases(machine: Machine) -> Sequence[Case]:
    shape = shape_for(machine, Shape(width=512, depth=2, heads=8, image=128, patch=16, batch=32))
    amount = Amount(repeats=192, warmup=12, rounds=2, block=3, measures_costs=True)
    slowdowns: tuple[int, ...] = (2, 4)
    if machine.is_tiny:
        amount = Amount(repeats=1, warmup=2, rounds=1, block=1, measures_costs=False)
        slowdowns = (4,)
    in_turns = partial(repeated, machine, shape, amount)
    return [
        *(Case(f"two ranks, χ = {each}", partial(in_turns, each), 8 * GIB) for each in slowdowns),
        Case("two ranks, a busy process on the GPU of rank 1", partial(busy_gpu, machine, shape, amount), 8 * GIB),
    ]


PART = Part(
    name="group",
    about="""
*Two ranks* train a ViT as one tensor-parallel group, in single precision; the variants take turns. They share the GPU
over Gloo, unless there are two GPUs. All ranks compute every product 192 times, so that Gloo's copies do not hide the
products, and rank 1 computes it χ times as often. Bound: the time without a straggler, in which the products take
e/(e − 1 + 1/χ) times as long. This also holds on a shared GPU, which slows both ranks equally when both compute. Aim:
`auto` at most 1.05 times the bound. The loss of `off` and `auto` (exact) must be that without a straggler.

*A busy process* computes on the GPU of rank 1. With one GPU it slows both ranks, so that `auto` must do nothing; with
two it makes a straggler. Bound: the best division of the measured work.
""",
    columns=("case", "mode", "iteration [ms]", "/ no straggler", "/ bound", "resized", "migrated", "loss", "note"),
    cases=cases,
)
