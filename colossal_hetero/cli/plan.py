"""``colossal-hetero plan``: a device for each layer, and its groups."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .common import (
    Choices,
    GroupedCommand,
    amount_option,
    check_outputs,
    choice_option,
    cluster_argument,
    degrees_option,
    errors_on_one_line,
    file_option,
    global_batch_option,
    load_inputs,
    make_console,
    memory_reserve_option,
    profile_argument,
    sizes_option,
    status_line,
)

if TYPE_CHECKING:
    from ..planner.cost.pass_order import Schedule

PROOF_SECONDS = 2.0


GROUPS = {
    "What to train": ("global_batch", "memory_reserve"),
    "Plans to try": ("micro_batch", "tp", "schedules", "zero_stages", "no_recompute", "equal", "overlap", "method"),
    "Search": ("gap", "time_limit"),
    "Output": ("out", "plot", "top", "framework"),
}


@click.command(cls=GroupedCommand, groups=GROUPS)
@cluster_argument
@profile_argument
@global_batch_option
@memory_reserve_option
@sizes_option
@degrees_option
@click.option(
    "--schedule",
    "schedules",
    type=Choices(["1f1b", "interleaved", "zbv"]),
    default="1f1b",
    show_default=True,
    help="Schedules of pipelines to try, separated by commas: interleaved has two chunks per stage, zbv is the "
    "zero-bubble schedule.",
)
@click.option(
    "--zero-stages",
    type=Choices(["0", "1"]),
    default="0,1",
    show_default=True,
    help="ZeRO stages to try; stage 1 is chosen where it gains 1 %. Only 0 in other schedules than 1f1b.",
)
@click.option(
    "--no-recompute",
    is_flag=True,
    help="No stage recomputes its activations. By default, in the schedule 1f1b, a stage recomputes them if they do "
    "not fit in memory.",
)
@click.option(
    "--equal",
    is_flag=True,
    help="Only plans with equal replicas: the same stages and equally many micro-batches in each. By default replicas "
    "may differ in the schedule 1f1b.",
)
@click.option(
    "--overlap",
    is_flag=True,
    help="Communication between replicas overlaps with passes: ZeRO stage 1 with overlap_communication and "
    "overlap_allgather. Only for the schedule 1f1b.",
)
@choice_option(
    "--method",
    *("exact", "uniform", "holmes", "adapt", "autohet"),
    help="How the layers of a pipeline are divided into stages; the last four are those of papers.",
)
@amount_option(
    "--gap",
    "PERCENT",
    "End the search when no plan can be faster by more than this; else search everything, and prove what can be "
    "proved in two seconds. Only for the schedule 1f1b without --overlap.",
)
@amount_option(
    "--time-limit", "SECONDS", "With --gap, how long to look for a plan and a proof.", default=5.0, show_default=True
)
@file_option("--out", "Write the best plan to this JSON file.")
@file_option("--plot", "Draw the schedule of the best plan: .png, .pdf or .svg.")
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Number of plans to list.")
@click.option(
    "--format",
    "framework",
    type=click.Choice(["megatron", "deepspeed", "flagscale", "colossalai"]),
    help="Print the arguments or files with which this framework runs the best plan, or why it cannot. By default the "
    "lines that train with this package.",
)
def plan(
    cluster: Path,
    profile: Path,
    global_batch: int,
    memory_reserve: float | None,
    micro_batch: tuple[int, ...] | None,
    tp: tuple[int, ...] | None,
    schedules: tuple[Schedule, ...],
    zero_stages: tuple[str, ...],
    no_recompute: bool,
    equal: bool,
    overlap: bool,
    method: str,
    gap: float | None,
    time_limit: float,
    out: Path | None,
    plot: Path | None,
    top: int,
    framework: str | None,
) -> None:
    """Plan the training of a model on a cluster: tensor, data and pipeline parallelism, and which device runs which
    layers.

    CLUSTER is a TOML file that describes the machines, PROFILE a JSON file with the times and sizes of the model's
    layers. Prints the plan with the shortest predicted iteration, the next best plans and why they are slower, and how
    to train with the best plan. To choose which machines to rent, see `colossal-hetero rent`.
    """
    from ..planner.cost.plan import save_plan
    from ..planner.report.launch_commands import training_call
    from ..planner.report.plan_table import one_line, render
    from ..planner.solver.problem import Problem
    from ..planner.solver.search import search
    from .other_frameworks import plan_for

    with errors_on_one_line():
        check_outputs(out, picture=plot)
        topology, model = load_inputs(cluster, profile, memory_reserve)
        problem = Problem(
            topology=topology,
            profile=model,
            global_batch=global_batch,
            micro_batches=micro_batch,
            tensor_parallel=tp,
            schedules=schedules,
            method=method,
            unequal=not equal,
            recompute=not no_recompute,
            zero_stages=tuple(map(int, zero_stages)),
            overlap=overlap,
        )
        with status_line(f"planning for {len(topology.devices):,} devices"):
            bound, share = (PROOF_SECONDS, None) if gap is None else (time_limit, gap / 100)
            answer = search(problem, keep=top, compare=True, bound_seconds=bound, gap=share)
            found = answer.of_files(cluster, profile)
        if out is not None:
            save_plan(found.best, out)
        if plot is not None:
            from ..planner.cost.simulate import simulate_plan
            from ..planner.report.plan_picture import plot_plan

            with status_line("drawing"):
                plot_plan(simulate_plan(found.best), plot)
    console = make_console()
    console.print(render(found.plans))
    if framework is None:
        call = training_call(found.best, str(out or "plan.json"), overlap=overlap)
    else:
        call = plan_for(framework, found.best, topology, overlap=overlap)
    console.print(f"{one_line(found.best)}\n\n{call}", markup=False, soft_wrap=True)
    if out is None:
        console.print("\n# --out plan.json writes this plan to that file", markup=False, soft_wrap=True)
