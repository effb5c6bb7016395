"""Predicted and measured iteration time of a pipeline with unequal stages, when a CPU quota slows one rank.

sudo python -m benchmarks.pipeline.pipeline_stages [--quotas 1 0.5 0.25] [--hidden 192 384] [--rounds 3]

Two ranks train a ViT of 6 blocks with the 1F1B schedule, in 8 micro-batches of 8 images. Rank 1 is under a CPU quota
that the program does not know. For each quota the layers are measured on both ranks. From these times the iteration
time of every split of the blocks is predicted, with the formula that the planner uses and with a simulation of the
schedule. Then the splits are trained in turns. With --orders the slow rank also takes the first stage, so that all
plans that the planner can choose are trained. The planner's plan is compared with the best of them. A last table has
the largest error of each quota and hidden size. --out writes the seconds of equal stages, ADAPT's and the planner's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.common import make_vit, print_table, quota_on, read_options, start_ranks, take_turns
from benchmarks.pipeline.trained import Trained, measure_layers, shape
from benchmarks.plans import price_ranks, simple_plan
from colossal_hetero.cli.probe_ranks import probe_ranks
from colossal_hetero.common.files import write_json
from colossal_hetero.planner.cost.simulate import simulate_plan
from colossal_hetero.planner.profile.fitted_profiles import as_profiled

BLOCKS, MICRO_BATCH, GLOBAL_BATCH, PERIOD_US = 6, 8, 64, 20_000


def main() -> None:
    arguments = read_options(
        __doc__, quotas=(1.0, 0.5, 0.25), hidden=(192, 384), rounds=3, block=3, orders=False, out=Path
    )
    start_ranks(2)
    rows = []
    for hidden in arguments.hidden:
        for quota in arguments.quotas:
            with quota_on(1, quota, PERIOD_US):
                errors = compare(quota, hidden, arguments)
            rows.append((hidden, f"{quota:g}", len(errors), f"{max(errors):.1%}", f"{median(errors):.1%}"))
    columns = ("hidden size", "quota", "splits", "largest error", "median error")
    print_table("Errors of the formula", columns, rows)


def compare(quota: float, hidden: int, arguments: argparse.Namespace) -> list[float]:
    """Print the predictions for one quota and hidden size; returns the relative errors of the formula."""
    profile = measure_layers(make_vit(hidden, BLOCKS), MICRO_BATCH)
    topology = as_profiled(probe_ranks(torch.device("cpu"))[0], profile)
    sizes = {"micro_batch": MICRO_BATCH, "global_batch": GLOBAL_BATCH}
    plans = [
        price_ranks(topology, profile, [[[rank] for rank in order]], bounds=(0, first, BLOCKS), **sizes)
        for order in ([(0, 1), (1, 0)] if arguments.orders else [(0, 1)])
        for first in range(1, BLOCKS)
    ]
    variants = {shape(plan.replicas[0]): Trained(plan, make_vit(hidden, BLOCKS)) for plan in plans}
    take_turns(list(variants.values()), 1, arguments.rounds, arguments.block)
    rows, errors = [], []
    for name, variant in variants.items():
        formula, simulated = variant.plan.iteration_seconds, simulate_plan(variant.plan).seconds
        measured = variant.median_seconds
        errors.append(abs(formula / measured - 1))
        cells = (measured, formula, f"{formula / measured - 1:+.1%}", simulated, f"{simulated / measured - 1:+.1%}")
        rows.append((name, *cells))
    taken = {name: variant.median_seconds for name, variant in variants.items()}
    best = min(taken, key=lambda name: taken[name])
    uniform = next(name for name, each in variants.items() if each.plan.layers_per_stage[0] * 2 == BLOCKS)
    wishes = dict(global_batch=GLOBAL_BATCH, micro_batches=[MICRO_BATCH], stages=[2], unequal=False)
    chosen, adapt = (
        shape(simple_plan(topology, profile, **wishes, method=method).replicas[0]) for method in ("exact", "adapt")
    )
    if arguments.out is not None and dist.get_rank() == 0:
        names = {"equal": uniform, "ours": chosen, "adapt": adapt}
        write_json({each: [name, taken[name]] for each, name in names.items() if name in taken}, arguments.out)
    notes = []
    if chosen in taken:
        notes.append(
            f"Planned: {chosen}, {taken[chosen]:.3f} s. That is {taken[chosen] / taken[best]:.3f} times the best time "
            f"({best}, {taken[best]:.3f} s), and {taken[uniform] / taken[chosen]:.2f} times as fast as the uniform "
            f"split ({taken[uniform]:.3f} s)."
        )
    notes.append(f"Closed form: largest error {max(errors):.1%}, median {median(errors):.1%}.")
    columns = ("blocks by stage", "measured [s]", "formula [s]", "error", "simulated [s]", "error")
    print_table(f"Hidden size {hidden}; rank 1 of 2 under a CPU quota of {quota:g} of a core", columns, rows, notes)
    return errors


if __name__ == "__main__":
    main()
