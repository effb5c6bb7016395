"""``plan="auto"`` makes plans of the search space that is asked for, and simple ones if others gain little."""

from __future__ import annotations

from contextlib import suppress

import pytest

from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.ranked_plan import MIN_WIDER_GAIN
from colossal_hetero.planner.cost.runnable import NoPlanError, why_not_runnable
from colossal_hetero.plugin.hybrid.plan_agreement import best_plan
from colossal_hetero.plugin.plan_config import PlanConfig
from tests.support.random_clusters import whole_space_problem


def is_simple(plan: Plan) -> bool:
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    return not plan.zero_stage and not any(stage.recompute for stage in stages)


def test_wider_spaces_are_used_where_they_gain_enough() -> None:
    used, kept = set(), 0
    for seed in range(40):
        topology, profile, global_batch = whole_space_problem(seed)
        plans: dict[str, Plan] = {}
        for space in ("simple", "default"):
            with suppress(NoPlanError):
                planning = PlanConfig(global_batch_size=global_batch, search_space=space)
                plans[space] = best_plan(planning, topology, profile)
        for space, plan in plans.items():
            assert why_not_runnable(plan) is None
            if space == "simple":
                assert is_simple(plan)
            elif is_simple(plan):
                kept += 1
            elif "simple" in plans and plan.symmetric and plans["simple"].symmetric:
                used.add(space)
                assert plan.iteration_seconds * MIN_WIDER_GAIN < plans["simple"].iteration_seconds
    assert used == {"default"} and kept > 5


def test_spaces_that_are_not_possible() -> None:
    with pytest.raises(ValueError, match="search_space='whole': valid are simple, default"):
        PlanConfig(search_space="whole")
    with pytest.raises(ValueError, match="for the schedule 1f1b only, not for 1f1b, zbv"):
        PlanConfig(search_space="default", schedules=("1f1b", "zbv"))
