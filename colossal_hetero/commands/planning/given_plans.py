"""Plans that a user gives: the file of a plan, or a layout on one line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..common import Whole

if TYPE_CHECKING:
    from ...planner.cluster.topology import Topology
    from ...planner.evaluation.evaluate import EvaluatedPlan
    from ...planner.profile.layer_profile import ModelProfile

__all__ = ["Batches", "batch_options", "evaluate_given"]

Command = TypeVar("Command", bound=Any)


@dataclass(frozen=True)
class Batches:
    """What the user says about batches, for layouts that do not say it."""

    micro_batch: int | None
    micro_batches: int | None
    global_batch: int | None


BATCH_OPTIONS = (
    click.option("--micro-batch", type=Whole(), help="Samples per micro-batch, if a layout has no size."),
    click.option(
        "--micro-batches",
        type=Whole(),
        help="Micro-batches of each pipeline and iteration, if a layout has no number.",
    ),
    click.option(
        "--global-batch",
        type=Whole(),
        help="Samples per optimizer step; divided over the pipelines of a layout that has no number of micro-batches.",
    ),
    click.option(
        "--overlap",
        is_flag=True,
        help="Communication between replicas overlaps with passes, as in `colossal-hetero plan`.",
    ),
)


def batch_options(command: Command) -> Command:
    """Adds :data:`BATCH_OPTIONS` to a command."""
    for option in reversed(BATCH_OPTIONS):
        command = option(command)
    return command


def evaluate_given(
    given: str, topology: Topology, profile: ModelProfile, batches: Batches, *, overlap: bool
) -> tuple[EvaluatedPlan, list[str]]:
    """What a plan takes on these machines, and notes about it.

    Args:
        given: Name of a plan's file, or a layout on one line.
        topology: Machines.
        profile: Of the model.
        batches: For layouts. A plan's file says all of it.
        overlap: Whether communication between replicas overlaps with passes.

    Raises:
        ValueError: The plan cannot be read or does not fit the machines or the profile.
    """
    from ...planner.evaluation.evaluate import evaluate_layout, evaluate_plan, why_other_devices
    from ...planner.layout_line.plan_layout import layout_of
    from ...planner.layout_line.read_layout import read_layout
    from ...planner.plans.plan import load_plan
    from ...planner.profile.as_profiled import as_profiled

    if not os.path.exists(given) and "[" not in given:
        raise ValueError(
            f"{given or 'an empty name'}: no such file; a layout on one line names its pipelines in brackets, such as "
            "dp 2 x pp [A100-40 0-23], micro-batch 2 x 32"
        )
    if not os.path.exists(given):
        layout = read_layout(given).with_batches(batches.micro_batch, batches.micro_batches)
        return evaluate_layout(topology, profile, layout, global_batch=batches.global_batch, overlap=overlap), []
    plan = load_plan(given)
    problem = why_other_devices(as_profiled(topology, profile), plan)
    if problem is None:
        return evaluate_plan(topology, profile, plan, overlap=overlap), []
    note = f"the devices were chosen again, because the file was made for other machines: {problem}"
    return evaluate_layout(topology, profile, layout_of(plan), overlap=overlap), [note]
