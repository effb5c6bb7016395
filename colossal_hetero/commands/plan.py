"""``colossal-hetero plan``: which device gets which layers, in which groups."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .common import Choices, Numbers, check_outputs, errors_on_one_line, make_console, status_line, warn_old_option

if TYPE_CHECKING:
    from rich.console import Console

    from ..planner.schedules.pass_order import Schedule

__all__ = ["plan"]


@click.command()
@click.argument("cluster", type=click.Path(path_type=Path))
@click.argument("profile", type=click.Path(path_type=Path))
@click.option(
    "--global-batch",
    type=click.IntRange(min=1),
    required=True,
    help="Samples per optimizer step, over all devices.",
)
@click.option(
    "--micro-batch", type=Numbers(), help="Sizes of micro-batches to try, in samples; default: all in the profile."
)
@click.option("--tp", type=Numbers(), help="Tensor-parallel degrees to try; default: all in the profile.")
@click.option(
    "--method",
    type=click.Choice(["exact", "simulated", "uniform", "holmes", "adapt", "autohet"]),
    default="exact",
    show_default=True,
    help="How the layers of a pipeline are split into stages.",
)
@click.option(
    "--schedule",
    "schedules",
    type=Choices(["1f1b", "interleaved", "zbv"]),
    default="1f1b",
    show_default=True,
    help="Schedules of pipelines to try, separated by commas; zbv is the zero-bubble schedule.",
)
@click.option(
    "--model-chunks",
    type=Numbers(),
    default="2",
    show_default=True,
    help="Numbers of chunks per stage to try with --schedule interleaved.",
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
@click.option("--runnable", is_flag=True, hidden=True)
@click.option("--symmetric", is_flag=True, hidden=True)
@click.option("--unequal", is_flag=True, hidden=True)
@click.option(
    "--memory-reserve",
    type=click.FloatRange(min=0),
    metavar="GB",
    help="Memory of each device that is not planned with, in 10⁹ bytes; default: as in the cluster file.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the best plan to this JSON file.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the schedule of the best plan: .png, .pdf or .svg.",
)
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Number of plans to list.")
def plan(
    cluster: Path,
    profile: Path,
    global_batch: int,
    micro_batch: tuple[int, ...] | None,
    tp: tuple[int, ...] | None,
    method: str,
    schedules: tuple[Schedule, ...],
    model_chunks: tuple[int, ...],
    equal: bool,
    overlap: bool,
    runnable: bool,
    symmetric: bool,
    unequal: bool,
    memory_reserve: float | None,
    out: Path | None,
    plot: Path | None,
    top: int,
) -> None:
    """Plan the training of a model on a cluster: tensor, data and pipeline parallelism, and which device runs which
    layers.

    CLUSTER is a TOML file that describes the machines, PROFILE a JSON file with the times and sizes of the model's
    layers. Prints the plan with the shortest predicted iteration, the next best plans and why they are slower, and how
    to train with the best plan.
    """
    from ..planner.cluster.cluster_file import load_cluster
    from ..planner.plans.plan import save_plan
    from ..planner.profile.layer_profile import load_model_profile
    from ..planner.report.launch_commands import training_call
    from ..planner.report.plan_table import one_line, render
    from ..planner.search.make_plans import make_plans

    if runnable:
        warn_old_option("--runnable", "leave it out: only plans that can be run are made")
    if symmetric:
        warn_old_option("--symmetric", "use --equal")
    if unequal:
        warn_old_option("--unequal", "leave it out: replicas may differ unless --equal is given")
    equal = equal or symmetric
    with errors_on_one_line():
        if unequal and equal:
            raise ValueError("--unequal asks for plans whose replicas may differ, --equal for none of these; give one")
        check_outputs(out, picture=plot)
        if cluster.suffix == ".json" and profile.suffix == ".toml":
            raise ValueError(f"the cluster comes first, then the profile: give {profile} before {cluster}")
        model = load_model_profile(profile)
        topology = load_cluster(cluster)
        if memory_reserve is not None:
            topology = topology.with_memory_reserve(round(memory_reserve * 1e9))
        with status_line(f"planning for {len(topology.devices):,} devices"):
            plans = make_plans(
                topology,
                model,
                global_batch=global_batch,
                micro_batches=micro_batch,
                tensor_parallel=tp,
                schedules=schedules,
                model_chunks=model_chunks,
                method=method,
                unequal=not equal,
                keep=top,
                compare=True,
                overlap=overlap,
                cluster_file=cluster.name,
                profile_file=profile.name,
            )
        best = plans[0].plan
        if out is not None:
            save_plan(best, out)
        if plot is not None:
            from ..planner.report.plan_picture import plot_plan

            with status_line("drawing"):
                plot_plan(best, plot)
    console = make_console()
    console.print(render(plans))
    _print(console, f"{one_line(best)}\n\n{training_call(best, str(out or 'plan.json'), overlap=overlap)}")
    if out is None:
        _print(console, "\n# --out plan.json writes this plan to that file")


def _print(console: Console, text: str) -> None:
    """Print without markup and without line breaks, so that commands can be copied."""
    console.print(text, markup=False, soft_wrap=True)
