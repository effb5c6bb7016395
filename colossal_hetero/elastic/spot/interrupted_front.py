"""Plans that are worth their price, with what interruptions of spot nodes cost on average."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...planner.cluster.topology import Topology
from ...planner.plans.runnable import NoPlanError
from ...planner.prices.node_choice import node_types
from ...planner.prices.pareto_front import FrontPoint, Interrupted, pareto_front, worth_their_price
from ...planner.profile.layer_profile import ModelProfile
from ..replay.assumptions import Assumptions
from ..replay.fitted_plans import FittedPlans, slowest_channel
from .expected_goodput import expected_goodput

__all__ = ["interrupted_front"]


def interrupted_front(
    topology: Topology,
    profile: ModelProfile,
    assumptions: Assumptions,
    *,
    at_most: Mapping[str, int] | None = None,
    time_limit_seconds: float = 5.0,
    **options: Any,
) -> list[FrontPoint]:
    """The plans of which none is both faster and cheaper than another on average, from the fastest to the cheapest.

    They are chosen among the plans that are worth their price without interruptions, with and without spot nodes.

    Args:
        topology: all nodes that can be had, with prices and the terms of spot nodes.
        profile: times and sizes of the model's layers.
        assumptions: what recoveries and joins cost.
        at_most: quotas, see :func:`.pareto_front.pareto_front`, as for ``time_limit_seconds``.
        options: arguments of ``make_plans``.

    Raises:
        NoPlanError: there is no plan, or with none of them an iteration ever counts.
        ValueError: a price is not known.
    """
    types = node_types(topology)
    quotas = dict(at_most or {})
    options_of_both = dict(time_limit_seconds=time_limit_seconds, **options)
    points = pareto_front(topology, profile, at_most=quotas, **options_of_both)
    spot = [each for each in types if topology.nodes[each.nodes[0]].spot is not None]
    if 0 < len(spot) < len(types):
        without_spot = quotas | {each.name: 0 for each in spot}
        with suppress(NoPlanError):  # nodes that stay may not hold the model
            points += pareto_front(topology, profile, at_most=without_spot, **options_of_both)
    plans = FittedPlans(topology, profile, link=slowest_channel(topology), **options)
    interrupted = []
    for point in points:
        expected = expected_goodput(topology, types, point.nodes, plans, assumptions)
        dollars = expected.dollars_per_iteration + point.cost.egress_dollars
        if expected.iterations_per_second > 0:
            interrupted.append(replace(point, interrupted=Interrupted(expected.iteration_seconds, dollars)))
    if not interrupted:
        raise NoPlanError(
            "the nodes are taken away so often, or for so long, that no iteration ever counts "
            f"({_in_words(topology)}); add nodes that stay, or nodes that are taken away less often"
        )
    return worth_their_price(interrupted)


def _in_words(topology: Topology) -> str:
    """The terms of all types of spot nodes."""
    terms = [(each.name, topology.nodes[each.nodes[0]].spot) for each in node_types(topology)]
    return ", ".join(
        f"{name}: preemptions_per_hour {each.preemptions_per_hour:g}, replacement_minutes {each.replacement_minutes:g}"
        for name, each in terms
        if each is not None
    )
