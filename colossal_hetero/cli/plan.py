"""``colossal-hetero plan``: a device for each layer, and its groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from .common import (
    MAX_AMOUNT,
    Choices,
    Finite,
    GroupedCommand,
    Numbers,
    Quotas,
    Whole,
    check_outputs,
    errors_on_one_line,
    make_console,
    memory_reserve_option,
    status_line,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ..planner.cluster.topology import Topology
    from ..planner.cost.pass_order import Schedule
    from ..planner.cost.ranked_plan import RankedPlan
    from ..planner.profile.layer_profile import ModelProfile
    from ..planner.search.gap_goal import Effort
    from ..planner.search.pareto_front import Objective

__all__ = ["plan"]

PROOF_SECONDS = 2.0
GROUPS = {
    "What to train": ("global_batch", "memory_reserve"),
    "Plans to try": (
        "micro_batch",
        "tp",
        "method",
        "schedules",
        "model_chunks",
        "equal",
        "overlap",
        "gap",
        "time_limit",
    ),
    "Search space": ("search_space", "mixed_degrees", "recompute", "zero_stages", "more_profiles"),
    "Prices": ("objective", "samples", "budget", "deadline", "at_most", "front_plot"),
    "Output": ("out", "plot", "top"),
}


@click.command(cls=GroupedCommand, groups=GROUPS)
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
@click.option(
    "--search-space",
    type=click.Choice(["simple", "default", "whole"]),
    help="simple: one form of stages, ZeRO stage 0. default: also recomputation and ZeRO stage 1, where they gain 1 %. "
    "whole: also plans that cannot be run yet; they are marked so. If it is not given: simple with prices, --overlap, "
    "other schedules than 1f1b and the methods of papers, else default.",
)
@click.option(
    "--mixed-degrees", is_flag=True, help="Stages may have different tensor-parallel degrees. Cannot be run yet."
)
@click.option(
    "--recompute",
    is_flag=True,
    help="Stages that do not fit otherwise run their forward passes again in the backward passes.",
)
@click.option("--zero-stages", type=Choices(["0", "1"]), help="ZeRO stages to try; default: those of the search space.")
@click.option(
    "--more-profiles",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A profile of the same model in another precision, whose plans are compared with the others; can be given "
    "several times.",
)
@memory_reserve_option
@click.option(
    "--objective",
    type=click.Choice(["time", "cost"]),
    help="Choose which nodes to take, of those in the cluster file, which needs prices: for the shortest time or for "
    "the lowest cost. Lists the plans that are worth their price.",
)
@click.option("--samples", type=Whole(MAX_AMOUNT), help="Samples of the whole training, for its time and its cost.")
@click.option(
    "--budget",
    type=Finite(min=0, min_open=True),
    metavar="DOLLARS",
    help="The training may cost so much at most; needs --samples.",
)
@click.option(
    "--deadline",
    type=Finite(min=0, min_open=True),
    metavar="HOURS",
    help="The training may take so long at most; needs --samples.",
)
@click.option(
    "--at-most",
    type=Quotas(),
    help="Take at most so many nodes of a type, or devices of a kind, of those in the cluster file: A100-40=16,v100=2.",
)
@click.option(
    "--time-limit",
    type=Finite(min=0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to look for nodes to take; with --gap, for a plan and a proof.",
)
@click.option(
    "--gap",
    type=Finite(min=0),
    metavar="PERCENT",
    help="End the search when no plan can be faster by more than this; else search everything, and prove what can be "
    "proved in two seconds. Only for the schedule 1f1b without --overlap.",
)
@click.option(
    "--front-plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the plans that are worth their price: .png, .pdf or .svg.",
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
    search_space: str | None,
    mixed_degrees: bool,
    recompute: bool,
    zero_stages: tuple[str, ...] | None,
    more_profiles: tuple[Path, ...],
    memory_reserve: float | None,
    objective: Objective | None,
    samples: int | None,
    budget: float | None,
    deadline: float | None,
    at_most: dict[str, int] | None,
    time_limit: float,
    gap: float | None,
    front_plot: Path | None,
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
    from ..planner.cost.plan import save_plan
    from ..planner.cost.tp_groups import DEFAULT, SIMPLE, WHOLE, SearchSpace
    from ..planner.profile.fitted_profiles import on_links
    from ..planner.profile.layer_profile import load_model_profile
    from ..planner.report.launch_commands import training_call
    from ..planner.report.plan_table import one_line, render
    from ..planner.search.make_plans import plans_of_profiles

    with errors_on_one_line():
        for name, given in (("--budget", budget), ("--deadline", deadline)):
            if given is not None and samples is None:
                raise ValueError(f"{name} is for the whole training; say with --samples how long that is")
        by_price = any(each is not None for each in (objective, samples, budget, deadline, at_most, front_plot))
        simple_only = by_price or overlap or schedules != ("1f1b",) or method not in ("exact", "simulated")
        start = {"simple": SIMPLE, "default": DEFAULT, "whole": WHOLE}[
            search_space or ("simple" if simple_only else "default")
        ]
        space = SearchSpace(
            mixed_degrees=mixed_degrees or start.mixed_degrees,
            recompute=recompute or start.recompute,
            zero_stages=tuple(map(int, zero_stages)) if zero_stages else start.zero_stages,
        )
        if by_price and (space != SIMPLE or more_profiles):
            raise ValueError(
                "plans are compared by price in the simple search space and from one profile only; leave out the "
                "options of the search space"
            )
        if by_price and (schedules != ("1f1b",) or overlap):
            raise ValueError("plans are compared by price for the schedule 1f1b without --overlap only; leave them out")
        if by_price and gap is not None:
            raise ValueError("--gap is for one cluster; plans that are compared by price say their gaps, leave it out")
        check_outputs(out, picture=plot)
        check_outputs(None, picture=front_plot)
        if cluster.suffix == ".json" and profile.suffix == ".toml":
            raise ValueError(f"the cluster comes first, then the profile: give {profile} before {cluster}")
        topology = load_cluster(cluster)
        model = on_links(load_model_profile(profile), topology)
        if memory_reserve is not None:
            topology = topology.with_memory_reserve(round(memory_reserve * 1e9))
        options: dict[str, Any] = dict(
            global_batch=global_batch, micro_batches=micro_batch, tensor_parallel=tp, method=method, unequal=not equal
        )
        console = make_console()
        with status_line(f"planning for {len(topology.devices):,} devices"):
            if by_price:
                names = dict(cluster_file=cluster.name, profile_file=profile.name)
                wish = _Wish(objective, samples, budget, deadline, at_most or {})
                table, plans = _by_price(topology, model, wish, time_limit, front_plot, options | names)
            else:
                table, plans = (
                    None,
                    plans_of_profiles(
                        topology,
                        [
                            (profile.name, model),
                            *((path.name, on_links(load_model_profile(path), topology)) for path in more_profiles),
                        ],
                        schedules=schedules,
                        model_chunks=model_chunks,
                        keep=top,
                        compare=True,
                        overlap=overlap,
                        effort=_effort(gap, time_limit),
                        space=space,
                        prefer_simple=not more_profiles,
                        cluster_file=cluster.name,
                        **options,
                    ),
                )
        best = plans[0].plan
        if out is not None:
            save_plan(best, out)
        if plot is not None:
            from ..planner.report.plan_picture import plot_plan

            with status_line("drawing"):
                plot_plan(best, plot)
    if table is not None:
        console.print(table)
    console.print(render(plans))
    call = training_call(best, str(out or "plan.json"), overlap=overlap)
    _print(console, f"{one_line(best)}\n\n{call}")
    if out is None:
        _print(console, "\n# --out plan.json writes this plan to that file")


def _effort(gap: float | None, time_limit: float) -> Effort:
    """Effort for a lower bound; ``gap`` is in percent."""
    from ..planner.search.gap_goal import Effort

    if gap is not None:
        return Effort(gap=gap / 100, bound_seconds=time_limit, search_seconds=time_limit)
    return Effort(bound_seconds=PROOF_SECONDS)


class _Wish(NamedTuple):
    objective: Objective | None
    samples: int | None
    budget: float | None
    deadline: float | None
    at_most: Mapping[str, int]


def _by_price(
    topology: Topology,
    model: ModelProfile,
    wish: _Wish,
    time_limit: float,
    picture: Path | None,
    options: Mapping[str, Any],
) -> tuple[RenderableType, list[RankedPlan]]:
    from ..planner.cost.ranked_plan import RankedPlan
    from ..planner.report.comparison_report import plot_front, render_front, training_in_words
    from ..planner.search.pareto_front import choose, limits_in_words, node_types, pareto_front

    front = pareto_front(topology, model, at_most=wish.at_most, time_limit_seconds=time_limit, **options)
    limits: dict[str, float] = {}
    in_words: Callable[[float | None, float | None], str] = limits_in_words
    if wish.samples is not None:
        iterations = wish.samples / options["global_batch"]
        if wish.budget is not None:
            limits["max_dollars"] = wish.budget / iterations
        if wish.deadline is not None:
            limits["max_seconds"] = wish.deadline * 3600 / iterations
        in_words = partial(training_in_words, iterations=iterations)
    objective = wish.objective or ("cost" if wish.deadline is not None else "time")
    chosen = choose(front, objective, **limits, in_words=in_words)
    types = node_types(topology)
    if picture is not None:
        plot_front(front, types, chosen, picture)
    return render_front(front, types, chosen, wish.samples), [RankedPlan(chosen.plan, "the best within the limits")]


def _print(console: Console, text: str) -> None:
    """Print without markup and without line breaks, so that commands can be copied."""
    console.print(text, markup=False, soft_wrap=True)
