"""Predicted and measured iteration time of a pipeline with unequal stages, when a CPU quota slows one rank.

sudo python -m benchmarks.pipeline.pipeline_stages [--quotas 1,0.5,0.25] [--hidden 192,384] [--blocks 6] [--rounds 3]

Two ranks train a ViT with the 1F1B schedule. Rank 1 is under a CPU quota that the program does not know. For each
quota the layers are measured on both ranks. From these times the iteration time of every split of the blocks is
predicted, with the formula that the planner uses and with a simulation of the schedule. Then the splits are trained
in turns. With --orders the slow rank also takes the first stage, so that all plans that the planner can choose are
trained. The planner's plan is compared with the best of them. A last table has the largest error of each quota and
hidden size.

Needs Linux and write access to cgroups (version 1 or 2).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (lets Colossal-AI work on a CPU, without its warnings)
from benchmarks.common import print_table, start_ranks
from benchmarks.plans import price_ranks, simple_plan

# isort: split
from colossalai.booster import Booster

from colossal_hetero import HeteroHybridParallelPlugin
from colossal_hetero.cli.probe_ranks import probe_ranks
from colossal_hetero.common.files import write_json
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.simulate import simulate_plan
from colossal_hetero.planner.profile.fitted_profiles import as_profiled
from colossal_hetero.profiling.layer_profiler import profile_layers
from colossal_hetero.testing.stragglers import cpu_quota

IMAGE, PATCH, HEADS = 32, 4, 4


def build_model(hidden: int, blocks: int) -> VisionTransformer:
    torch.manual_seed(1)
    return VisionTransformer(
        img_size=IMAGE,
        patch_size=PATCH,
        embed_dim=hidden,
        depth=blocks,
        num_heads=HEADS,
        num_classes=10,
        class_token=False,
        global_pool="avg",
    )


def make_batch(samples: int, image: int = IMAGE) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(samples, 3, image, image, generator=generator)
    return images, torch.randint(0, 10, (samples,), generator=generator)


class Trained:
    """A model that is trained with one plan, and its iteration times."""

    def __init__(
        self,
        plan: Plan | str,
        hidden: int,
        arguments: argparse.Namespace,
        model: torch.nn.Module | None = None,
        image: int = IMAGE,
        **options: Any,
    ) -> None:
        self.seconds: list[float] = []
        model = build_model(hidden, arguments.blocks) if model is None else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.plugin = HeteroHybridParallelPlugin(plan=plan, precision="fp32", **options)
        self.plan = self.plugin.plan if plan == "auto" else plan
        self.booster = Booster(plugin=self.plugin)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        self.batch = list(make_batch(arguments.global_batch, image))

    def iterate(self) -> float:
        """Train one iteration; returns its seconds."""
        dist.barrier()
        start = time.perf_counter()
        self.booster.execute_pipeline(iter([self.batch]), self.model, loss, self.optimizer, return_loss=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # An iteration ends when all ranks have finished it.
        dist.barrier()
        return time.perf_counter() - start

    @property
    def name(self) -> str:
        stages = self.plan.replicas[0].stages
        return " then ".join(f"rank {stage.ranks[0]}: {stage.blocks[1] - stage.blocks[0]}" for stage in stages)

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)


def train_in_turns(runs: Sequence[Trained], rounds: int, block: int) -> None:
    """Train all ``runs`` so many ``rounds``, each time an iteration that is not timed and then ``block`` timed ones."""
    for run in runs:
        run.iterate()
    for _ in range(rounds):
        for run in runs:
            run.iterate()
            run.seconds.extend(run.iterate() for _ in range(block))


def loss(outputs: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(outputs, batch[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quotas", default="1,0.5,0.25", help="shares of a CPU core for rank 1 (default: %(default)s)")
    parser.add_argument("--period-us", type=int, default=20_000, help="period of the quota (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of the ViT (default: %(default)s)")
    parser.add_argument("--hidden", default="192,384", help="hidden sizes of the ViT (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=8, help="images per micro-batch (default: %(default)s)")
    parser.add_argument("--global-batch", type=int, default=64, help="images per iteration (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each split (default: %(default)s)")
    parser.add_argument("--block", type=int, default=3, help="timed iterations per turn (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file for the seconds of equal stages, ADAPT's and the planner's")
    parser.add_argument("--orders", action="store_true", help="also try splits with the slow rank first")
    arguments = parser.parse_args()
    start_ranks(2)
    rows = []
    for hidden in map(int, arguments.hidden.split(",")):
        for quota in map(float, arguments.quotas.split(",")):
            with ExitStack() as stack:
                if dist.get_rank() == 1 and quota < 1:
                    stack.enter_context(cpu_quota(quota, arguments.period_us))
                errors = compare(quota, hidden, arguments)
            rows.append((hidden, f"{quota:g}", len(errors), f"{max(errors):.1%}", f"{median(errors):.1%}"))
    columns = ("hidden size", "quota", "splits", "largest error", "median error")
    print_table("Errors of the formula", columns, rows)


def compare(quota: float, hidden: int, arguments: argparse.Namespace) -> list[float]:
    """Print the predictions for one quota and hidden size; returns the relative errors of the formula."""
    batch, sizes = make_batch(arguments.micro_batch), [arguments.micro_batch]
    model = build_model(hidden, arguments.blocks)
    profile = profile_layers(model, batch, F.cross_entropy, micro_batches=sizes, optimizer="adamw").profile
    topology = as_profiled(probe_ranks(torch.device("cpu"))[0], profile)
    orders = [(0, 1), (1, 0)] if arguments.orders else [(0, 1)]
    variants = [
        Trained(
            price_ranks(
                topology,
                profile,
                [[[rank] for rank in order]],
                bounds=(0, first, arguments.blocks),
                micro_batch=arguments.micro_batch,
                global_batch=arguments.global_batch,
            ),
            hidden,
            arguments,
        )
        for order in orders
        for first in range(1, arguments.blocks)
    ]
    train_in_turns(variants, arguments.rounds, arguments.block)
    rows = []
    for variant in variants:
        formula, simulated = variant.plan.iteration_seconds, simulate_plan(variant.plan).seconds
        measured = variant.median_seconds
        rows.append(
            (
                variant.name,
                measured,
                formula,
                f"{formula / measured - 1:+.1%}",
                simulated,
                f"{simulated / measured - 1:+.1%}",
            )
        )
    best = min(variants, key=lambda variant: variant.median_seconds)
    uniform = next(each for each in variants if each.plan.layers_per_stage[0] * 2 == arguments.blocks)
    chosen = simple_plan(
        topology,
        profile,
        global_batch=arguments.global_batch,
        micro_batches=[arguments.micro_batch],
        stages=[2],
        unequal=False,
    )
    if arguments.out is not None and dist.get_rank() == 0:
        wishes = {"global_batch": arguments.global_batch, "micro_batches": [arguments.micro_batch]}
        plans = {"equal": uniform.plan, "ours": chosen}
        plans["adapt"] = simple_plan(topology, profile, **wishes, stages=[2], unequal=False, method="adapt")
        taken = {tuple(shape(variant.plan)): variant for variant in variants}
        found = {name: taken.get(tuple(shape(plan))) for name, plan in plans.items()}
        write_json(
            {name: [each.name, each.median_seconds] for name, each in found.items() if each is not None}, arguments.out
        )
    notes = []
    for variant in variants:
        if shape(variant.plan) == shape(chosen):
            took = variant.median_seconds
            notes.append(
                f"Planned: {variant.name}, {took:.3f} s. That is {took / best.median_seconds:.3f} times the best time "
                f"({best.name}, {best.median_seconds:.3f} s), and {uniform.median_seconds / took:.2f} times as fast as "
                f"the uniform split ({uniform.median_seconds:.3f} s)."
            )
    errors = [abs(variant.plan.iteration_seconds / variant.median_seconds - 1) for variant in variants]
    notes.append(f"Closed form: largest error {max(errors):.1%}, median {median(errors):.1%}.")
    title = f"Hidden size {hidden}; rank 1 of 2 under a CPU quota of {quota:g} of a core"
    print_table(
        title,
        ("blocks by stage", "measured [s]", "formula [s]", "error", "simulated [s]", "error"),
        rows,
        notes,
    )
    return errors


def shape(plan: Plan) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    return [(stage.ranks, stage.blocks) for stage in plan.replicas[0].stages]


if __name__ == "__main__":
    main()
