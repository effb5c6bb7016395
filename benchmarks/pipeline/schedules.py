"""Predicted and measured iteration time of planned 1F1B, interleaved and zero-bubble pipelines.

sudo python -m benchmarks.pipeline.schedules [--quotas 1 0.5] [--hidden 384] [--global-batches 16 64]

Two ranks train a ViT of 8 blocks over Gloo in micro-batches of 8 images. Rank 1 is under a CPU quota that the program
does not know. The layers are measured on both ranks, the best plan of two stages is made for each schedule, and the
plans are trained in turns. A further 1F1B run of the same plan is the control.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.common import make_vit, print_table, quota_on, read_options, start_ranks, take_turns
from benchmarks.pipeline.trained import Trained, measure_layers, shape
from benchmarks.plans import simple_plan
from colossal_hetero.cli.probe_ranks import probe_ranks
from colossal_hetero.planner.cost.pass_order import SCHEDULES
from colossal_hetero.planner.profile.fitted_profiles import as_profiled

BLOCKS, MICRO_BATCH, PERIOD_US = 8, 8, 20_000


def compare(quota: float, global_batch: int, arguments: argparse.Namespace) -> list[tuple[object, ...]]:
    """Rows for one quota and global batch."""
    profile = measure_layers(make_vit(arguments.hidden, BLOCKS), MICRO_BATCH)
    topology = as_profiled(probe_ranks(torch.device("cpu"))[0], profile)
    wishes = dict(global_batch=global_batch, micro_batches=[MICRO_BATCH], stages=[2], all_devices=True)
    runs = []
    for schedule in (*SCHEDULES, SCHEDULES[0]):
        plan = simple_plan(topology, profile, **wishes, schedules=[schedule])
        runs.append(Trained(plan, make_vit(arguments.hidden, BLOCKS)))
    take_turns(runs, 1, arguments.rounds, arguments.block)
    rows = []
    for number, run in enumerate(runs):
        predicted, measured = run.plan.iteration_seconds, run.median_seconds
        name = run.plan.schedule + (", again" if number == len(SCHEDULES) else "")
        error = f"{predicted / measured - 1:+.1%}"
        faster = f"{runs[0].median_seconds / measured:.2f}"
        expected = f"{runs[0].plan.iteration_seconds / predicted:.2f}"
        first = f"{quota:g}", global_batch // MICRO_BATCH, name, shape(run.plan.replicas[0])
        rows.append((*first, measured, predicted, error, faster, expected))
    return rows


def main() -> None:
    arguments = read_options(__doc__, quotas=(1.0, 0.5), hidden=384, global_batches=(16, 64), rounds=3, block=3)
    start_ranks(2)
    rows = []
    for quota in arguments.quotas:
        for global_batch in arguments.global_batches:
            with quota_on(1, quota, PERIOD_US):
                rows += compare(quota, global_batch, arguments)
    columns = ("quota", "micro-batches", "schedule", "blocks", "measured [s]", "predicted [s]", "error")
    title = f"ViT, {BLOCKS} blocks, hidden size {arguments.hidden}, two stages"
    print_table(title, (*columns, "times 1F1B's speed", "predicted"), rows)


if __name__ == "__main__":
    main()
