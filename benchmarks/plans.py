"""The best simple plan, and the price of a plan whose ranks are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.layout_line import given_layout
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.price import price
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.solver.problem import Problem
from colossal_hetero.planner.solver.search import search
from colossal_hetero.planner.stages.rules import uniform_bounds

__all__ = ["price_ranks", "simple_plan"]


def simple_plan(topology: Topology, profile: ModelProfile, **wishes: Any) -> Plan:
    """The best plan without recomputation, in ZeRO stage 0; ``wishes`` are further fields of :class:`.Problem`."""
    problem = Problem(topology=topology, profile=profile, recompute=False, zero_stages=(0,), **wishes)
    return search(problem, keep=1).best


def price_ranks(
    topology: Topology,
    profile: ModelProfile,
    ranks: Sequence[Sequence[Sequence[int]]],
    *,
    micro_batch: int,
    global_batch: int,
    bounds: Sequence[int] | None = None,
) -> Plan:
    """The 1F1B plan of equal replicas with these ranks, ``[replicas][stages][ranks of a stage]``; with equal stages if
    no ``bounds`` are given."""
    cut = uniform_bounds(profile.blocks, len(ranks[0])) if bounds is None else bounds
    layout = given_layout(topology, ranks, cut, micro_batch=micro_batch, global_batch=global_batch)
    return price(topology, profile, layout, tuple(tuple(map(tuple, row)) for row in ranks))
