"""Predicted and measured iteration time of planned 1F1B, interleaved and zero-bubble pipelines.

sudo python -m benchmarks.pipeline.schedules [--quotas 1,0.5] [--hidden 384] [--blocks 8] [--global-batches 16,64]

Two ranks train a ViT over Gloo. Rank 1 is under a CPU quota that the program does not know. The layers are measured on
both ranks, the best plan of two stages is made for each schedule, and the plans are trained in turns. A further 1F1B
run of the same plan is the control.

Needs Linux and, for quotas below 1, write access to cgroups (version 1 or 2).
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.common import print_table, start_ranks
from benchmarks.pipeline.pipeline_stages import Trained, build_model, make_batch, train_in_turns
from benchmarks.plans import simple_plan
from colossal_hetero.cli.probe_ranks import probe_ranks
from colossal_hetero.planner.cost.pass_order import SCHEDULES
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.profile.fitted_profiles import as_profiled
from colossal_hetero.profiling.layer_profiler import profile_layers
from colossal_hetero.testing.stragglers import cpu_quota


def blocks_of(plan: Plan) -> str:
    """Blocks of each stage, those of its chunks joined by "+"."""
    stages = plan.replicas[0].stages
    return " | ".join(
        f"rank {stage.ranks[0]}: " + "+".join(str(stop - start) for start, stop in stage.block_ranges)
        for stage in stages
    )


def compare(quota: float, global_batch: int, arguments: argparse.Namespace) -> list[tuple[object, ...]]:
    """Rows for one quota and global batch."""
    batch, sizes = make_batch(arguments.micro_batch), [arguments.micro_batch]
    model = build_model(arguments.hidden, arguments.blocks)
    profile = profile_layers(model, batch, F.cross_entropy, micro_batches=sizes, optimizer="adamw").profile
    topology = as_profiled(probe_ranks(torch.device("cpu"))[0], profile)
    arguments.global_batch = global_batch
    runs = []
    for schedule in (*SCHEDULES, SCHEDULES[0]):
        plan = simple_plan(
            topology,
            profile,
            global_batch=global_batch,
            micro_batches=sizes,
            stages=[2],
            schedules=[schedule],
            all_devices=True,
        )
        runs.append(Trained(plan, arguments.hidden, arguments))
    train_in_turns(runs, arguments.rounds, arguments.block)
    rows = []
    for number, run in enumerate(runs):
        predicted, measured = run.plan.iteration_seconds, run.median_seconds
        name = run.plan.schedule + (", again" if number == len(SCHEDULES) else "")
        error = f"{predicted / measured - 1:+.1%}"
        faster = f"{runs[0].median_seconds / measured:.2f}"
        expected = f"{runs[0].plan.iteration_seconds / predicted:.2f}"
        parts = global_batch // arguments.micro_batch
        rows.append((f"{quota:g}", parts, name, blocks_of(run.plan), measured, predicted, error, faster, expected))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quotas", default="1,0.5", help="shares of a CPU core for rank 1 (default: %(default)s)")
    parser.add_argument("--period-us", type=int, default=20_000, help="period of the quota (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of the ViT (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=384, help="hidden size of the ViT (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=8, help="images per micro-batch (default: %(default)s)")
    parser.add_argument("--global-batches", default="16,64", help="images per iteration (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each schedule (default: %(default)s)")
    parser.add_argument("--block", type=int, default=3, help="timed iterations per turn (default: %(default)s)")
    arguments = parser.parse_args()
    start_ranks(2)
    rows = []
    for quota in map(float, arguments.quotas.split(",")):
        for global_batch in map(int, arguments.global_batches.split(",")):
            with ExitStack() as stack:
                if dist.get_rank() == 1 and quota < 1:
                    stack.enter_context(cpu_quota(quota, arguments.period_us))
                rows += compare(quota, global_batch, arguments)
    columns = ("quota", "micro-batches", "schedule", "blocks", "measured [s]", "predicted [s]", "error")
    print_table(
        f"ViT, {arguments.blocks} blocks, hidden size {arguments.hidden}, two stages",
        (*columns, "times 1F1B's speed", "predicted"),
        rows,
    )


if __name__ == "__main__":
    main()
