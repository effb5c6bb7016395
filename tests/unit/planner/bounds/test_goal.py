"""A search that may end when its plan is near enough to the bound."""

from __future__ import annotations

import re
from typing import Any

import pytest

from colossal_hetero.planner.solver.gap_goal import Effort
from tests.support.planning import make_plans
from tests.support.random_clusters import like_nodes_problem

pytestmark = pytest.mark.unit


def test_a_search_ends_when_a_plan_is_near_enough() -> None:
    topology, profile, global_batch = like_nodes_problem(1)
    wishes = dict(global_batch=global_batch, recompute=True, zero_stages=(0, 1))
    early = make_plans(topology, profile, effort=Effort(gap=1000.0, bound_seconds=5), **wishes)[0]
    whole = make_plans(topology, profile, **wishes)[0]
    assert early.plan.iteration_seconds >= whole.plan.iteration_seconds
    first, every = (int(re.findall(r"of the (\d+) plan", each.reason)[0]) for each in (early, whole))
    assert first < every


@pytest.mark.parametrize("options", [{"overlap": True}, {"schedules": ("1f1b", "zbv")}])
def test_no_gap_is_proved_for_other_plans(options: dict[str, Any]) -> None:
    topology, profile, global_batch = like_nodes_problem(1)
    with pytest.raises(ValueError, match="for the schedule 1f1b without overlap only"):
        make_plans(topology, profile, global_batch=global_batch, effort=Effort(gap=0.1, bound_seconds=1), **options)
    plan = make_plans(topology, profile, global_batch=global_batch, effort=Effort(bound_seconds=1), **options)[0].plan
    assert plan.bound_seconds is None
