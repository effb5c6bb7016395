"""Predicted and measured iteration time of the best plan, whose replicas may differ, and of the best equal one.

sudo python -m benchmarks.pipeline.unequal_replicas [--quotas 1,0.5,0.5] [--hidden 192] [--blocks 6] [--rounds 5]

Three ranks train a ViT over Gloo; each is under a CPU quota that the program does not know. The layers are measured on
all ranks at once, then plans for all three are made from these times: of equal replicas only, and of any. With
``--memory`` the slow ranks are planned as if they had this share of the memory that the best plan needs, so that no
slow rank can hold the model alone. The plans are trained in turns. The error is that of the prediction; "× equal"
compares measured times, and "predicted" the same of the predictions. The control is the equal plan once more.

Needs Linux and write access to cgroups (version 1 or 2).
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from contextlib import ExitStack
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.common import describe_machine, print_table, start_ranks
from benchmarks.pipeline.pipeline_stages import build_model, loss, make_batch
from benchmarks.plans import simple_plan
from colossal_hetero.cli.probe_ranks import probe_ranks
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.simulate import simulate_plan
from colossal_hetero.planner.profile.fitted_profiles import as_profiled
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.profiling.layer_profiler import profile_layers
from colossal_hetero.testing.stragglers import cpu_quota

# isort: split
from colossalai.booster import Booster

from colossal_hetero import HeteroHybridParallelPlugin


class Trained:
    """A model that is trained with a plan, and its iteration times."""

    def __init__(self, plan: Plan, hidden: int, blocks: int) -> None:
        self.plan = plan
        self.seconds: list[float] = []
        model: torch.nn.Module = build_model(hidden, blocks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.plugin = HeteroHybridParallelPlugin(plan=plan, precision="fp32")
        self.booster = Booster(plugin=self.plugin)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        own = next(
            replica
            for replica in self.plugin.plan.replicas
            if any(dist.get_rank() in stage.ranks for stage in replica.stages)
        )
        self.batch = list(make_batch(own.micro_batches * plan.micro_batch))

    def iterate(self) -> float:
        """Train one iteration; returns its seconds, which end when all ranks have finished it."""
        dist.barrier()
        start = time.perf_counter()
        self.booster.execute_pipeline(iter([self.batch]), self.model, loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - start


def shape(plan: Plan) -> str:
    """Each replica: the blocks of its stages with their ranks, and its micro-batches."""
    return "; ".join(
        " → ".join(f"rank {stage.ranks[0]}: {stage.blocks[1] - stage.blocks[0]}" for stage in replica.stages)
        + f" (× {replica.micro_batches})"
        for replica in plan.replicas
    )


def with_less_memory(topology: Topology, quotas: list[float], usable_bytes: float) -> Topology:
    """Slow devices can use so much memory."""
    devices = []
    for device, quota in zip(topology.devices, quotas, strict=True):
        if quota < 1:
            memory = device.kind.memory_reserve_bytes + int(usable_bytes)
            device = dataclasses.replace(device, kind=dataclasses.replace(device.kind, memory_bytes=memory))
        devices.append(device)
    return dataclasses.replace(topology, devices=tuple(devices))


def best_plans(topology: Topology, profile: ModelProfile, global_batch: int, micro_batch: int) -> dict[str, Plan]:
    """The best plan of equal replicas, and of any."""
    return {
        name: simple_plan(
            topology,
            profile,
            global_batch=global_batch,
            micro_batches=[micro_batch],
            unequal=unequal,
            all_devices=True,
        )
        for name, unequal in (("equal", False), ("any", True))
    }


def needed_bytes(plan: Plan, reserve: int) -> float:
    """The memory of the largest stage beside the reserve."""
    return max(stage.memory_bytes for replica in plan.replicas for stage in replica.stages) - reserve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quotas", default="1,0.5,0.5", help="shares of a CPU core, by rank (default: %(default)s)")
    parser.add_argument("--memory", default="1,0.8", help="memory of slow ranks by what the best plan needs")
    parser.add_argument("--period-us", type=int, default=20_000, help="period of the quota (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of the ViT (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=192, help="hidden size of the ViT (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=8, help="images per micro-batch (default: %(default)s)")
    parser.add_argument("--global-batch", type=int, default=96, help="images per iteration (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each plan (default: %(default)s)")
    parser.add_argument("--block", type=int, default=3, help="timed iterations per turn (default: %(default)s)")
    arguments = parser.parse_args()
    quotas = [float(each) for each in arguments.quotas.split(",")]
    start_ranks(len(quotas))
    rows, notes = [], []
    with ExitStack() as stack:
        if quotas[dist.get_rank()] < 1:
            stack.enter_context(cpu_quota(quotas[dist.get_rank()], arguments.period_us))
        model, batch = build_model(arguments.hidden, arguments.blocks), make_batch(arguments.micro_batch)
        sizes = [arguments.micro_batch]
        profile = profile_layers(model, batch, F.cross_entropy, micro_batches=sizes, optimizer="adamw").profile
        measured = as_profiled(probe_ranks(torch.device("cpu"))[0], profile)
        batches = arguments.global_batch, arguments.micro_batch
        unlimited = best_plans(measured, profile, *batches)
        for memory in map(float, arguments.memory.split(",")):
            plans = unlimited
            if memory < 1:
                needed = memory * needed_bytes(unlimited["any"], measured.devices[0].kind.memory_reserve_bytes)
                plans = best_plans(with_less_memory(measured, quotas, needed), profile, *batches)
            variants = {"equal": plans["equal"], "equal, again": plans["equal"], "any": plans["any"]}
            runs = {name: Trained(plan, arguments.hidden, arguments.blocks) for name, plan in variants.items()}
            for _ in range(arguments.rounds):
                for run in runs.values():
                    run.iterate()
                    run.seconds.extend(run.iterate() for _ in range(arguments.block))
            equal = median(runs["equal"].seconds)
            for name, run in runs.items():
                took, predicted = median(run.seconds), run.plan.iteration_seconds
                expected = predicted / plans["equal"].iteration_seconds
                numbers = (took, predicted, simulate_plan(run.plan).seconds, took / predicted, took / equal, expected)
                rows.append([f"{memory:g}", name, shape(run.plan), *(f"{number:.3f}" for number in numbers)])
    if dist.get_rank() == 0:
        print(describe_machine())
    print_table(
        f"CPU quotas {arguments.quotas}; aims: measured ≤ 1.10 of predicted, faster where predicted by 5 %",
        [
            *("memory", "plans", "blocks by replica and rank (× micro-batches)", "measured [s]", "predicted [s]"),
            *("simulated [s]", "measured / predicted", "× equal", "predicted"),
        ],
        rows,
        notes,
    )


if __name__ == "__main__":
    main()
