"""Plans for a few devices: none of all possible plans is better."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from colossal_hetero.planner.cost.placement import place_together
from colossal_hetero.planner.cost.runnable import why_not_runnable
from colossal_hetero.planner.cost.tp_groups import slot_kinds
from tests.support.every_plan import EveryPlan
from tests.support.planning import make_plans
from tests.support.random_clusters import small_problem
from tests.support.random_examples import IS_THOROUGH

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


def test_no_slot_is_placed_twice() -> None:
    # The second kind has a slot in the node of the first and another one elsewhere; a pipeline takes both.
    topology, profile, _ = small_problem(276)
    kinds = slot_kinds(topology, profile, 1, 1)
    nodes = [device.node for device in topology.devices]
    groups = [tuple(len(kind.slots) for kind in kinds)]
    (pipeline,) = place_together(groups, [kind.slots for kind in kinds], nodes, [0] * len(topology.nodes))
    assert max(Counter(pipeline).values()) == 1
    assert len(pipeline) == len(topology.devices)
