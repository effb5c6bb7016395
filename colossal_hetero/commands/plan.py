"""``colossal-hetero plan``: which device gets which layers, in which groups."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import check_outputs, make_console, mended_by_user

if TYPE_CHECKING:
    from rich.console import Console

    from ..planner.cluster.topology import Topology
    from ..planner.plans.plan import Plan
    from ..planner.profile.layer_profile import ModelProfile
    from ..planner.search.make_plans import Candidate

__all__ = ["plan"]

PATIENCE_SECONDS = 1.0
"""Work that takes longer than this says what it is."""


class Numbers(click.ParamType):
    """Whole numbers from 1, with commas between them."""

    name = "n,n,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers, ascending, each once."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(sorted({int(part) for part in str(value).split(",")}))
        except ValueError:
            self.fail(f"{value!r} is no list of whole numbers; write them as 1,2,4", param, ctx)
        if numbers[0] < 1:
            self.fail(f"{numbers[0]} is below 1", param, ctx)
        return numbers


@click.command()
@click.argument("cluster", type=click.Path(path_type=Path))
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--global-batch", type=click.IntRange(min=1), required=True, help="Samples per optimizer step, in all.")
@click.option("--micro-batch", type=Numbers(), help="Sizes of micro-batches to try; default: all that were measured.")
@click.option("--tp", type=Numbers(), help="Tensor-parallel degrees to try; default: all that were measured.")
@click.option(
    "--method",
    type=click.Choice(["exact", "simulated", "uniform", "holmes", "adapt", "autohet"]),
    default="exact",
    show_default=True,
    help="How the layers of a pipeline are split into stages.",
)
@click.option("--symmetric", is_flag=True, help="Only plans that can be run: all replicas cut alike.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the best plan as JSON.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw its schedule: .png, .pdf or .svg.")
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Plans that are listed.")
def plan(
    cluster: Path,
    profile: Path,
    global_batch: int,
    micro_batch: tuple[int, ...] | None,
    tp: tuple[int, ...] | None,
    method: str,
    symmetric: bool,
    out: Path | None,
    plot: Path | None,
    top: int,
) -> None:
    """Plan the training of a model on a cluster: tensor, data and pipeline parallelism, and which device runs which
    layers.

    CLUSTER is a TOML file that describes the machines, PROFILE a JSON file with the times and sizes of the model's
    layers. Prints the plan with the least predicted time of an iteration, those that come next and why, and the
    calls that train with it.
    """
    from dataclasses import replace

    from ..planner.cluster.cluster_file import load_cluster
    from ..planner.plans.launch_order import as_launched
    from ..planner.plans.plan import save_plan
    from ..planner.profile.as_profiled import as_profiled
    from ..planner.profile.layer_profile import load_model_profile
    from ..planner.report.plan_table import one_line, render, training_call

    options = {
        "global_batch": global_batch,
        "micro_batches": micro_batch,
        "tensor_parallel": tp,
        "symmetric": symmetric,
    }
    with mended_by_user():
        check_outputs(out, picture=plot)
        if cluster.suffix == ".json" and profile.suffix == ".toml":
            raise ValueError(f"the cluster comes first, then the profile: give {profile} before {cluster}")
        model = load_model_profile(profile)
        topology = as_profiled(load_cluster(cluster), model)
        with _patience(f"planning for {len(topology.devices):,} devices"):
            candidates = _plans(topology, model, method, top, options)
        candidates = [_traced(each, cluster.name, profile.name, model.precision) for each in candidates]
        best = candidates[0].plan
        otherwise = as_launched(topology, model, best)
        if otherwise is not None:
            best = best.model_copy(update={"notes": (*best.notes, otherwise)})
            candidates[0] = replace(candidates[0], plan=best)
        if out is not None:
            save_plan(best, out)
        if plot is not None:
            from ..planner.report.plan_picture import plot_plan

            with _patience("drawing"):
                plot_plan(best, plot)
    console = make_console()
    console.print(render(candidates))
    _print(console, f"{one_line(best)}\n\n{training_call(best, str(out or 'plan.json'))}")
    if out is None:
        _print(console, "\n# with --out plan.json this plan is written to that file")


def _print(console: Console, text: str) -> None:
    """As it is: lines that are to be copied are not broken."""
    console.print(text, markup=False, soft_wrap=True)


def _plans(topology: Topology, model: ModelProfile, method: str, keep: int, options: dict[str, Any]) -> list[Candidate]:
    """The best plans, the first of them compared with what uniform stages would take."""
    from dataclasses import replace

    from ..planner.search.make_plans import make_plans

    candidates = make_plans(topology, model, method=method, keep=keep, **options)
    if method == "uniform":
        return candidates
    best = candidates[0]
    # Among the others can be one in an order of stages that the method itself does not try.
    seconds = [each.plan.iteration_seconds for each in candidates if _has_uniform_stages(each.plan)]
    changes: dict[str, Any] = {}
    try:
        seconds.append(make_plans(topology, model, method="uniform", keep=1, **options)[0].plan.iteration_seconds)
    except ValueError as error:
        if not seconds:
            changes = {"notes": (*best.plan.notes, f"no plan with uniform stages: {error}")}
    if seconds:
        changes = {"uniform_seconds": min(seconds)}
    return [replace(best, plan=best.plan.model_copy(update=changes)), *candidates[1:]]


def _has_uniform_stages(plan: Plan) -> bool:
    from itertools import pairwise

    from ..planner.stages.rules import uniform_bounds

    return all(
        [stage.blocks for stage in replica.stages] == list(pairwise(uniform_bounds(plan.blocks, len(replica.stages))))
        for replica in plan.replicas
    )


def _traced(candidate: Candidate, cluster: str, profile: str, precision: str) -> Candidate:
    """With the names of what it was made from."""
    from dataclasses import replace

    made: Plan = candidate.plan.model_copy(update={"cluster": cluster, "profile": profile, "precision": precision})
    return replace(candidate, plan=made)


@contextmanager
def _patience(what: str) -> Iterator[None]:
    """Say what is going on if it takes more than a moment and somebody is looking."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    status = console.status(what)
    timer = threading.Timer(PATIENCE_SECONDS, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()
