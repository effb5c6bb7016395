"""``colossal-hetero plan``: a device for each layer, and its groups; ``rent``: which machines to take, with prices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import common

if TYPE_CHECKING:
    from ..planner.solver.pareto_front import Objective
    from ..planner.solver.problem import Problem

PROOF_SECONDS = 2.0


@click.command()
@common.cluster_argument
@common.profile_argument
@common.global_batch_option
@common.memory_reserve_option
@common.sizes_option
@common.degrees_option
@click.option(
    "--schedule",
    "schedules",
    type=common.Choices(["1f1b", "interleaved", "zbv"]),
    default="1f1b",
    show_default=True,
    help="Schedules of pipelines to try, separated by commas: interleaved has two chunks per stage, zbv is the "
    "zero-bubble schedule.",
)
@click.option(
    "--zero-stages",
    type=common.Choices(["0", "1"]),
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
@common.choice_option(
    "--method",
    *("exact", "uniform", "holmes", "adapt", "autohet"),
    help="How the layers of a pipeline are divided into stages; the last four are those of papers.",
)
@common.amount_option(
    "--gap",
    "PERCENT",
    "End the search when no plan can be faster by more than this; else search everything, and prove what can be "
    "proved in two seconds. Only for the schedule 1f1b without --overlap.",
)
@common.amount_option(
    "--time-limit", "SECONDS", "With --gap, how long to look for a plan and a proof.", default=5.0, show_default=True
)
@common.file_option("--out", "Write the best plan to this JSON file.")
@common.file_option("--plot", "Draw the schedule of the best plan: .png, .pdf or .svg.")
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
    zero_stages: tuple[str, ...],
    no_recompute: bool,
    overlap: bool,
    gap: float | None,
    time_limit: float,
    out: Path | None,
    plot: Path | None,
    top: int,
    framework: str | None,
    **wishes: Any,
) -> None:
    """Plan the training of a model on a cluster: tensor, data and pipeline parallelism, and which device runs which
    layers.

    CLUSTER is a TOML file that describes the machines, PROFILE a JSON file with the times and sizes of the model's
    layers. Prints the plan with the shortest predicted iteration, the next best plans and why they are slower, and how
    to train with the best plan. To choose which machines to rent, see `colossal-hetero rent`.
    """
    from ..planner.cost.plan import save_plan
    from ..planner.report.plan_table import one_line, render
    from ..planner.solver.search import search
    from .frameworks import plan_for, training_call

    with common.errors_on_one_line():
        common.check_outputs(out, picture=plot)
        stages = tuple(map(int, zero_stages))
        problem = _problem(cluster, profile, recompute=not no_recompute, zero_stages=stages, overlap=overlap, **wishes)
        with common.status(f"planning for {len(problem.topology.devices):,} devices"):
            bound, share = (PROOF_SECONDS, None) if gap is None else (time_limit, gap / 100)
            answer = search(problem, keep=top, compare=True, bound_seconds=bound, gap=share)
            found = answer.of_files(cluster, profile)
        if out is not None:
            save_plan(found.best, out)
        if plot is not None:
            from ..planner.cost.simulate import simulate_plan
            from ..planner.report.plan_picture import plot_plan

            with common.status("drawing"):
                plot_plan(simulate_plan(found.best), plot)
    console = common.make_console()
    console.print(render(found.plans))
    if framework is None:
        call = training_call(found.best, str(out or "plan.json"), overlap=overlap)
    else:
        call = plan_for(framework, found.best, problem.topology, overlap=overlap)
    console.print(f"{one_line(found.best)}\n\n{call}", markup=False, soft_wrap=True)
    if out is None:
        console.print("\n# --out plan.json writes this plan to that file", markup=False, soft_wrap=True)


@click.command()
@common.cluster_argument
@common.profile_argument
@common.global_batch_option
@click.option(
    "--samples",
    type=click.IntRange(1, common.MAX_AMOUNT),
    help="Samples of the whole training, for time and cost.",
)
@common.memory_reserve_option
@click.option(
    "--objective",
    type=click.Choice(["time", "cost"]),
    help="Choose for the shortest time or for the lowest cost.  [default: cost with --deadline, else time]",
)
@click.option(
    "--budget",
    type=common.Finite(min=0, min_open=True),
    metavar="DOLLARS",
    help="The training may cost so much at most; needs --samples.",
)
@click.option(
    "--deadline",
    type=common.Finite(min=0, min_open=True),
    metavar="HOURS",
    help="The training may take so long at most; needs --samples.",
)
@click.option(
    "--at-most",
    type=common.Quotas(),
    help="Take at most so many nodes of a type, or devices of a kind, of those in the cluster file: A100-40=16,v100=2.",
)
@common.sizes_option
@common.degrees_option
@click.option("--equal", is_flag=True, help="Only plans with equal replicas.")
@common.amount_option("--time-limit", "SECONDS", "How long to look for nodes to take.", default=5.0, show_default=True)
@common.file_option("--out", "Write the chosen plan to this JSON file.")
def rent(
    cluster: Path,
    profile: Path,
    samples: int | None,
    objective: Objective | None,
    budget: float | None,
    deadline: float | None,
    at_most: dict[str, int] | None,
    time_limit: float,
    out: Path | None,
    **wishes: Any,
) -> None:
    """Choose which machines to take, of those in CLUSTER, a TOML file with prices.

    PROFILE is a JSON file with the times and sizes of the model's layers. Lists the plans of which none is both faster
    and cheaper than another, and prints the one that is chosen.
    """
    from ..planner.cost.plan import save_plan
    from ..planner.cost.ranked_plan import RankedPlan
    from ..planner.report.plan_table import one_line, render, render_front
    from ..planner.solver.pareto_front import choose, node_types, pareto_front
    from .frameworks import training_call

    with common.errors_on_one_line():
        for name, given in (("--budget", budget), ("--deadline", deadline)):
            if given is not None and samples is None:
                raise ValueError(f"{name} is for the whole training; say with --samples how long that is")
        common.check_outputs(out)
        problem = _problem(cluster, profile, **wishes)
        with common.status(f"planning for parts of {len(problem.topology.devices):,} devices"):
            front = pareto_front(problem, at_most=at_most, time_limit_seconds=time_limit)
        iterations = None if samples is None else samples / problem.global_batch
        limits = {}
        if iterations is not None and budget is not None:
            limits["max_dollars"] = budget / iterations
        if iterations is not None and deadline is not None:
            limits["max_seconds"] = deadline * 3600 / iterations
        least: Objective = objective or ("cost" if deadline is not None else "time")
        chosen = choose(front, least, **limits, iterations=iterations)
        best = chosen.plan.model_copy(update={"cluster": cluster.name, "profile": profile.name})
        if out is not None:
            save_plan(best, out)
    console = common.make_console()
    console.print(render_front(front, node_types(problem.topology), chosen, samples))
    console.print(render([RankedPlan(best, "the best within the limits")]))
    call = training_call(best, str(out or "plan.json"))
    console.print(f"{one_line(best)}\n\n{call}", markup=False, soft_wrap=True)


def _problem(cluster: Path, profile: Path, *, memory_reserve: float | None, equal: bool, **wishes: Any) -> Problem:
    from ..planner.solver.problem import Problem

    topology, model = common.load_inputs(cluster, profile, memory_reserve)
    return Problem(topology=topology, profile=model, unequal=not equal, **wishes)
