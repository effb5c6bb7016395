"""Sums of gradients layer by layer: what overlap with backward passes gains, and what the sums cost equal replicas.

The first table: ranks are processes in two network namespaces, with NICs of limited bandwidth, and communicate over
Gloo. They train a ViT in fp32. Sums start during the last backward pass (``overlap_communication=True``) or all at its
end. Only this pass can hide them, because gradients of earlier micro-batches are added first. The size of the
micro-batch is chosen such that it takes ``--ratio`` times as long as the sums.

The second table: replicas that are alike, on this machine without a limited network, trained as before (sums by
``DistributedDataParallel`` or, with a pipeline, by Colossal-AI) and layer by layer, with the message before each step.
"As before" runs twice, as a control. Ways of training take turns in the same processes.

    sudo python -m benchmarks.pipeline.layer_sums [--megabits MBIT] [--ratio R] [--rounds N] [--iterations N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from benchmarks.common import medians_in_turns, print_table, read_options, slowest, steady_seconds
from benchmarks.pipeline.namespaces import nodes, run_in_namespaces
from benchmarks.pipeline.trained import loss

# isort: split
from colossalai.booster import Booster

from colossal_hetero import HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.planner.cost.plan import Plan, Replica, StagePlan

LAYER_SUMS = PlanConfig(layer_sums=True)
DEPTH, BUCKET_MB = 6, 2
MODEL = dict(img_size=64, patch_size=16, num_classes=10, embed_dim=256, depth=DEPTH, num_heads=4)
UNLIMITED = 100_000
"""Mbit/s of the second table: more than the processors can send."""
Shape = tuple[Sequence[tuple[int, int]], int]
"""A replica: rank and blocks of each stage, and its micro-batches."""

OVERLAP: dict[str, tuple[list[int], list[Shape]]] = {
    "1 + 1 stages, 1 micro-batch each": ([0, 1], [([(0, 6)], 1), ([(1, 6)], 1)]),
    "1 + 1 stages, 1 and 2 micro-batches": ([0, 1], [([(0, 6)], 1), ([(1, 6)], 2)]),
    "1 + 2 stages, 1 and 2 micro-batches": ([0, 1, 1], [([(0, 6)], 1), ([(1, 3), (2, 3)], 2)]),
}
"""By name: the node of each rank, and the replicas."""
EQUAL: dict[str, tuple[list[int], list[Shape]]] = {
    "2 × 1 stage, 2 micro-batches": ([0, 1], [([(0, 6)], 2), ([(1, 6)], 2)]),
    "2 × 2 stages, 2 micro-batches": ([0, 0, 1, 1], [([(0, 3), (1, 3)], 2), ([(2, 3), (3, 3)], 2)]),
}


def make_plan(shapes: Sequence[Shape], micro_batch: int) -> Plan:
    """A plan without predictions."""
    replicas = []
    for stages, micro_batches in shapes:
        made, start = [], 0
        for rank, blocks in stages:
            made.append(
                StagePlan(
                    blocks=(start, start + blocks), device="cpu", ranks=(rank,), node="here", forward_seconds=1.0,
                    backward_seconds=2.0, transfer_seconds=0.0, update_seconds=0.0, memory_bytes=0.0,
                    memory_available_bytes=1e9,
                )
            )  # fmt: skip
            start += blocks
        replicas.append(Replica(stages=tuple(made), micro_batches=micro_batches, pipeline_seconds=1.0))
    return Plan(
        model="ViT", blocks=DEPTH, method="given", tensor_parallel=1, micro_batch=micro_batch,
        global_batch=micro_batch * sum(number for _, number in shapes), iteration_seconds=1.0,
        synchronization_seconds=0.0, replicas=tuple(replicas),
    )  # fmt: skip


def build_model() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(**MODEL)


class Training:
    """A model that is trained with a plan."""

    def __init__(self, plan: Plan, planning: PlanConfig, sums: bool = True, **options: Any) -> None:
        self.plugin = HeteroHybridParallelPlugin(plan=plan, planning=planning, precision="fp32", **options)
        model: nn.Module = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        self.booster = Booster(plugin=self.plugin)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        self._sums = sums
        samples = plan.micro_batch * plan.replicas[self.plugin.replica()[0]].micro_batches
        self.batch = [torch.randn(samples, 3, 64, 64), torch.arange(samples) % 10]

    def iterate(self) -> None:
        with nullcontext() if self._sums else self.booster.no_sync(self.model, self.optimizer):
            self.booster.execute_pipeline(iter([self.batch]), self.model, loss, self.optimizer)
        if self._sums:
            self.optimizer.step()
        self.optimizer.zero_grad()


def summing_seconds(rounds: int = 3) -> float:
    """Of an all-reduce of all parameters between the first two ranks, which are in different nodes."""
    gradients = torch.ones(sum(parameter.numel() for parameter in build_model().parameters()))
    group = dist.new_group([0, 1])
    found = [0.0]
    for _ in range(rounds + 1 if dist.get_rank() < 2 else 0):
        begin = time.perf_counter()
        dist.all_reduce(gradients, group=group)
        found.append(time.perf_counter() - begin)
    return slowest(median(found[2:] or found))


def in_turns(trainings: dict[str, Training], arguments: argparse.Namespace) -> dict[str, float]:
    """Median seconds of an iteration, by way of training."""
    timed = {name: partial(steady_seconds, each.iterate, arguments.iterations) for name, each in trainings.items()}
    return medians_in_turns(timed, arguments.rounds)


def measure_overlap(shapes: Sequence[Shape], arguments: argparse.Namespace) -> tuple[int, float, dict[str, float]]:
    """Samples of a micro-batch, seconds of the sums alone, and of an iteration by way."""
    summing = summing_seconds()
    few, many = (
        steady_seconds(Training(make_plan(shapes, size), LAYER_SUMS, sums=False).iterate, 2) for size in (4, 12)
    )
    per_sample = max((many - few) / 8, many / 24)
    # Two thirds of the passes of a micro-batch are its backward pass.
    passes = arguments.ratio * summing * 1.5 * max(number for _, number in shapes)
    size = max(1, round((passes - max(many - 12 * per_sample, 0.0)) / per_sample))
    plan = make_plan(shapes, size)
    ways = {
        "at the end": Training(plan, LAYER_SUMS, overlap_communication=False, ddp_bucket_cap_mb=BUCKET_MB),
        "in the last backward pass": Training(plan, LAYER_SUMS, ddp_bucket_cap_mb=BUCKET_MB),
        "no sums": Training(plan, LAYER_SUMS, sums=False),
    }
    return size, summing, in_turns(ways, arguments)


def measure_equal(shapes: Sequence[Shape], arguments: argparse.Namespace) -> dict[str, float]:
    plan = make_plan(shapes, 8)
    ways = {"as before": PlanConfig(), "as before, again": PlanConfig(), "layer by layer": LAYER_SUMS}
    return in_turns({name: Training(plan, planning) for name, planning in ways.items()}, arguments)


def main() -> None:
    arguments = read_options(__doc__, megabits=400.0, ratio=1.25, rounds=7, iterations=4)
    rows = []
    with nodes([2], arguments.megabits, arguments.megabits) as places:
        for name, (node_of, shapes) in OVERLAP.items():
            ranks = [places[node] for node in node_of]
            size, summing, found = run_in_namespaces(ranks, measure_overlap, shapes, arguments)[0]
            end, early = found["at the end"], found["in the last backward pass"]
            numbers = (end, early, early / end, found["no sums"], summing)
            rows.append([name, size, *(f"{number:.3f}" for number in numbers)])
    print_table(
        f"Sums between two nodes, {arguments.megabits:g} Mbit/s; aim: ≤ 0.8 of summing at the end",
        ["replicas", "micro-batch", "at the end [s]", "early [s]", "× at the end", "passes [s]", "sums [s]"],
        rows,
    )
    rows = []
    with nodes([2], UNLIMITED, UNLIMITED, "10mb") as places:
        for name, (node_of, shapes) in EQUAL.items():
            found = run_in_namespaces([places[node] for node in node_of], measure_equal, shapes, arguments)[0]
            before = found["as before"]
            ratios = [found[way] / before for way in ("as before, again", "layer by layer")]
            rows.append([name, f"{before:.4f}", *(f"{ratio:.3f}" for ratio in ratios)])
    print_table(
        "Replicas that are alike; aim: ≤ 1.01 of the time before",
        ["replicas", "as before [s]", "again (control)", "layer by layer"],
        rows,
    )


if __name__ == "__main__":
    main()
