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
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (lets Colossal-AI work on a CPU, without its warnings)
from benchmarks.common import describe_machine, print_table
from benchmarks.pipeline.namespace_ranks import run_in_namespaces
from benchmarks.pipeline.namespaces import missing, nodes

# isort: split
from colossalai.booster import Booster

from colossal_hetero import HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.planner.cost.plan import Plan, Replica, StagePlan

LAYER_SUMS = PlanConfig(layer_sums=True)
DEPTH = 6
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


def loss_of(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, batch[1])


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
            self.booster.execute_pipeline(iter([self.batch]), self.model, loss_of, self.optimizer)
        if self._sums:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, iterations: int) -> float:
        """Of an iteration of the slowest rank."""
        dist.barrier()
        self.iterate()
        begin = time.perf_counter()
        for _ in range(iterations):
            self.iterate()
        return slowest((time.perf_counter() - begin) / iterations)


def slowest(seconds: float) -> float:
    """The longest time of all ranks."""
    longest = torch.tensor(seconds)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()


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
    times: dict[str, list[float]] = {name: [] for name in trainings}
    for _ in range(arguments.rounds):
        for name, training in trainings.items():
            times[name].append(training.seconds(arguments.iterations))
    return {name: median(found) for name, found in times.items()}


def measure_overlap(shapes: Sequence[Shape], arguments: argparse.Namespace) -> tuple[int, float, dict[str, float]]:
    """Samples of a micro-batch, seconds of the sums alone, and of an iteration by way."""
    summing = summing_seconds()
    few, many = (Training(make_plan(shapes, size), LAYER_SUMS, sums=False).seconds(2) for size in (4, 12))
    per_sample = max((many - few) / 8, many / 24)
    # Two thirds of the passes of a micro-batch are its backward pass.
    passes = arguments.ratio * summing * 1.5 * max(number for _, number in shapes)
    size = max(1, round((passes - max(many - 12 * per_sample, 0.0)) / per_sample))
    plan = make_plan(shapes, size)
    ways: dict[str, Callable[[], Training]] = {
        "at the end": lambda: Training(
            plan, LAYER_SUMS, overlap_communication=False, ddp_bucket_cap_mb=arguments.bucket
        ),
        "in the last backward pass": lambda: Training(plan, LAYER_SUMS, ddp_bucket_cap_mb=arguments.bucket),
        "no sums": lambda: Training(plan, LAYER_SUMS, sums=False),
    }
    return size, summing, in_turns({name: make() for name, make in ways.items()}, arguments)


def measure_equal(shapes: Sequence[Shape], arguments: argparse.Namespace) -> dict[str, float]:
    plan = make_plan(shapes, 8)
    ways = {"as before": PlanConfig(), "as before, again": PlanConfig(), "layer by layer": LAYER_SUMS}
    return in_turns({name: Training(plan, planning) for name, planning in ways.items()}, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=float, default=400, help="Mbit/s between the nodes (default: %(default)s)")
    parser.add_argument(
        "--ratio", type=float, default=1.25, help="time of the last backward pass by that of the sums (default: 1.25)"
    )
    parser.add_argument("--bucket", type=int, default=2, help="MiB of gradients in a message (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way of training (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=4, help="iterations in a turn (default: %(default)s)")
    arguments = parser.parse_args()
    reason = missing()
    if reason:
        sys.exit(f"cannot measure: {reason}")
    print(describe_machine())
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
