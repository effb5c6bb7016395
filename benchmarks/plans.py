"""The best simple plan, and the price of a plan whose ranks are given."""

from __future__ import annotations

from typing import Any

from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.price import price_ranks
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.solver.problem import Problem
from colossal_hetero.planner.solver.search import search

__all__ = ["price_ranks", "simple_plan"]


def simple_plan(topology: Topology, profile: ModelProfile, **wishes: Any) -> Plan:
    """The best plan without recomputation, in ZeRO stage 0; ``wishes`` are further fields of :class:`.Problem`."""
    problem = Problem(topology=topology, profile=profile, recompute=False, zero_stages=(0,), **wishes)
    return search(problem, keep=1).best
