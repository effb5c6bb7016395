"""Plans for a few devices: none of all possible plans is better; and plans with recomputation and ZeRO."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.cost.placement import place_together
from colossal_hetero.planner.cost.ranked_plan import ranking_seconds
from colossal_hetero.planner.cost.runnable import why_not_runnable, why_recomputes
from colossal_hetero.planner.cost.tp_groups import slot_kinds
from colossal_hetero.planner.profile.layer_profile import load_profile
from colossal_hetero.planner.report.plan_table import layout
from colossal_hetero.planner.solver.problem import Problem
from colossal_hetero.planner.solver.search import search
from tests.support.every_plan import EveryPlan, wishes_to_prove
from tests.support.paths import REPOSITORY
from tests.support.planning import make_plans
from tests.support.random_clusters import large_problem, small_problem, whole_space_problem
from tests.support.random_examples import IS_THOROUGH

EXAMPLES = REPOSITORY / "examples/plans"

PROBLEMS = 500 if IS_THOROUGH else 20
FIRST = 300
"""With the first problems, also the ordinary tests have plans that are easily missed (305, 309)."""


@pytest.mark.parametrize("unequal", [True, False])
def test_no_plan_of_few_devices_is_better(unequal: bool) -> None:
    impossible = differ = 0
    for seed in range(FIRST, FIRST + PROBLEMS):
        topology, profile, global_batch = small_problem(seed)
        best = EveryPlan(topology, profile, global_batch).best_seconds(unequal=unequal)
        if best == np.inf:
            impossible += 1
            with pytest.raises(ValueError, match=r"memory|hold"):
                make_plans(topology, profile, global_batch=global_batch, unequal=unequal)
            continue
        found = make_plans(topology, profile, global_batch=global_batch, unequal=unequal, keep=1)[0].plan
        assert found.iteration_seconds == pytest.approx(best, rel=1e-9), f"problem {seed}"
        differ += not found.symmetric
        assert why_not_runnable(found) is None
    assert impossible < PROBLEMS / 5
    assert (differ > PROBLEMS / 10) == unequal


FORMS = 210 if IS_THOROUGH else 35


def test_no_plan_of_few_devices_is_better_with_recomputation_and_zero() -> None:
    impossible, used = 0, Counter[str]()
    for seed in range(FORMS):
        problem, wishes = whole_space_problem(seed), wishes_to_prove(seed)
        unequal = seed % 4 > 0
        shortest = EveryPlan(*problem, **wishes).best_seconds(unequal=unequal)
        wished = problem.to_search(**wishes, unequal=unequal)
        if shortest == np.inf:
            impossible += 1
            with pytest.raises(ValueError, match=r"memory|hold"):
                search(wished, keep=1)
            continue
        found = search(wished, keep=1).best
        assert found.iteration_seconds == pytest.approx(shortest, rel=1e-9), f"problem {seed}"
        stages = [stage for replica in found.replicas for stage in replica.stages]
        for stage in stages:
            assert stage.memory_bytes <= stage.memory_available_bytes * (1 + 1e-9)
            assert wishes["recompute"] or not stage.recompute
        assert found.zero_stage in wishes["zero_stages"]
        assert why_not_runnable(found) is None
        used += Counter(recompute=sum(stage.recompute for stage in stages), zero=found.zero_stage)
    assert impossible < FORMS / 3
    assert min(used["recompute"], used["zero"]) > 0, used


@pytest.mark.parametrize("seed", [12, 2] if IS_THOROUGH else [12])
def test_recomputation_and_zero_gain_one_percent_or_are_not_used(seed: int) -> None:
    problem = large_problem(seed)
    simple, best = search(problem.to_search()).best, search(problem.to_search(recompute=True, zero_stages=(0, 1))).best
    ranking = ranking_seconds(simple.iteration_seconds, equal=simple.symmetric)
    plain = not best.zero_stage and why_recomputes(best) is None
    assert ranking_seconds(best.iteration_seconds, equal=best.symmetric, plain=plain) <= ranking * (1 + 1e-9)


def test_no_plan_is_listed_twice() -> None:
    """Several parts of a search find plans that differ only by which devices of a kind they use."""
    topology = load_cluster(EXAMPLES / "clusters/a100-v100.toml")
    profile = load_profile(EXAMPLES / "opt-350-a100-v100.json")
    ranked = search(Problem(topology=topology, profile=profile, global_batch=128), keep=6).plans
    layouts = [layout(each.plan) for each in ranked]
    assert len(layouts) == 6 and len(set(layouts)) == 6


def test_no_slot_is_placed_twice() -> None:
    # The second kind has a slot in the node of the first and another one elsewhere; a pipeline takes both.
    topology, profile, _ = small_problem(276)
    kinds = slot_kinds(topology, profile, 1, 1)
    nodes = [device.node for device in topology.devices]
    groups = [tuple(len(kind.slots) for kind in kinds)]
    (pipeline,) = place_together(groups, [kind.slots for kind in kinds], nodes, [0] * len(topology.nodes))
    assert max(Counter(pipeline).values()) == 1
    assert len(pipeline) == len(topology.devices)
