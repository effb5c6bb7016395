"""``colossal-hetero rent``: which machines to take, of those in a cluster file with prices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .common import (
    MAX_AMOUNT,
    Finite,
    GroupedCommand,
    Quotas,
    Whole,
    amount_option,
    check_outputs,
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
    from ..planner.solver.pareto_front import Objective


GROUPS = {
    "What to train": ("global_batch", "samples", "memory_reserve"),
    "Limits": ("objective", "budget", "deadline", "at_most"),
    "Plans to try": ("micro_batch", "tp", "equal", "time_limit"),
    "Output": ("out",),
}


@click.command(cls=GroupedCommand, groups=GROUPS)
@cluster_argument
@profile_argument
@global_batch_option
@click.option("--samples", type=Whole(MAX_AMOUNT), help="Samples of the whole training, for its time and its cost.")
@memory_reserve_option
@click.option(
    "--objective",
    type=click.Choice(["time", "cost"]),
    help="Choose for the shortest time or for the lowest cost.  [default: cost with --deadline, else time]",
)
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
@sizes_option
@degrees_option
@click.option("--equal", is_flag=True, help="Only plans with equal replicas.")
@amount_option("--time-limit", "SECONDS", "How long to look for nodes to take.", default=5.0, show_default=True)
@file_option("--out", "Write the chosen plan to this JSON file.")
def rent(
    cluster: Path,
    profile: Path,
    global_batch: int,
    samples: int | None,
    memory_reserve: float | None,
    objective: Objective | None,
    budget: float | None,
    deadline: float | None,
    at_most: dict[str, int] | None,
    micro_batch: tuple[int, ...] | None,
    tp: tuple[int, ...] | None,
    equal: bool,
    time_limit: float,
    out: Path | None,
) -> None:
    """Choose which machines to take, of those in CLUSTER, a TOML file with prices.

    PROFILE is a JSON file with the times and sizes of the model's layers. Lists the plans of which none is both faster
    and cheaper than another, and prints the one that is chosen.
    """
    from ..planner.cost.plan import save_plan
    from ..planner.cost.ranked_plan import RankedPlan
    from ..planner.report.launch_commands import training_call
    from ..planner.report.plan_table import one_line, render, render_front
    from ..planner.solver.pareto_front import choose, node_types, pareto_front
    from ..planner.solver.problem import Problem

    with errors_on_one_line():
        for name, given in (("--budget", budget), ("--deadline", deadline)):
            if given is not None and samples is None:
                raise ValueError(f"{name} is for the whole training; say with --samples how long that is")
        check_outputs(out)
        topology, model = load_inputs(cluster, profile, memory_reserve)
        problem = Problem(
            topology=topology,
            profile=model,
            global_batch=global_batch,
            micro_batches=micro_batch,
            tensor_parallel=tp,
            unequal=not equal,
        )
        with status_line(f"planning for parts of {len(topology.devices):,} devices"):
            front = pareto_front(problem, at_most=at_most, time_limit_seconds=time_limit)
        iterations = None if samples is None else samples / global_batch
        limits = {}
        if iterations is not None and budget is not None:
            limits["max_dollars"] = budget / iterations
        if iterations is not None and deadline is not None:
            limits["max_seconds"] = deadline * 3600 / iterations
        least: Objective = objective or ("cost" if deadline is not None else "time")
        chosen = choose(front, least, **limits, iterations=iterations)
        best = chosen.plan.model_copy(update={"cluster": cluster.name, "profile": profile.name})
        types = node_types(topology)
        if out is not None:
            save_plan(best, out)
    console = make_console()
    console.print(render_front(front, types, chosen, samples))
    console.print(render([RankedPlan(best, "the best within the limits")]))
    call = training_call(best, str(out or "plan.json"))
    console.print(f"{one_line(best)}\n\n{call}", markup=False, soft_wrap=True)
