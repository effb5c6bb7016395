"""Planning again for slow devices, compared with enumeration; the present plan always remains possible."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.ranked_plan import RankedPlan
from colossal_hetero.planner.cost.simulate import simulate_plan, slowed
from colossal_hetero.planner.solver import replan as replan_module
from colossal_hetero.planner.solver.replan import replan
from colossal_hetero.planner.solver.search import Answer
from tests.support.planning import make_plans, predict_plan
from tests.support.two_speeds import machines, profile


def enumerated(topology: Topology, global_batch: int, blocks: int) -> float:
    """The fastest simulated iteration of one device, of all splits over two, and of all shares of two replicas."""
    found = []
    layouts = [[[[0]]], [[[1]]], [[[0]], [[1]]], [[[0], [1]]], [[[1], [0]]]]
    for ranks, size in itertools.product(layouts, (1, 2)):
        for cut in range(1, blocks) if len(ranks[0]) == 2 else [blocks]:
            bounds = (0, cut, blocks) if len(ranks[0]) == 2 else (0, blocks)
            made = predict_plan(topology, profile(), ranks, micro_batch=size, global_batch=global_batch, bounds=bounds)
            found.append(simulate_plan(made).seconds)
            if len(ranks) == 2:
                # Any numbers of micro-batches; each replica is predicted alone.
                for samples in range(size, global_batch, size):
                    shares = ((ranks[0], samples), (ranks[1], global_batch - samples))
                    alone = [
                        predict_plan(topology, profile(), [one], micro_batch=size, global_batch=share)
                        for one, share in shares
                    ]
                    found.append(max(simulate_plan(each).seconds for each in alone) + made.synchronization_seconds)
    return min(found)


@pytest.mark.parametrize("factor", [1.5, 4.0, 20.0])
def test_the_best_plan_for_a_slow_device(factor: float) -> None:
    topology = machines("fast", "fast", devices_per_node=1)
    plan = make_plans(topology, profile(), global_batch=16)[0].plan
    result = replan(topology, profile(), plan, {1: factor})
    slower = dataclasses.replace(topology.devices[1], speed=1 / factor)
    changed = dataclasses.replace(topology, devices=(topology.devices[0], slower))
    assert result.best.seconds == pytest.approx(enumerated(changed, 16, 6), rel=0.02)
    # The present plan with its slow device, from the times in its file.
    assert result.present.seconds == pytest.approx(simulate_plan(plan, {1: factor}).seconds)
    assert result.changed and result.best.seconds < result.present.seconds


def test_devices_keep_their_measured_times() -> None:
    """A profile that was measured by the ranks does not undo the slowdown."""
    topology, measured = machines("fast", "fast", devices_per_node=1), profile(rank_devices=("fast", "fast"))
    plan = make_plans(topology, measured, global_batch=16)[0].plan
    result = replan(topology, measured, plan, {0: 3.0})
    assert result.best.seconds == replan(topology, profile(), plan, {0: 3.0}).best.seconds
    assert result.present.seconds == pytest.approx(simulate_plan(plan, {0: 3.0}).seconds)


@pytest.mark.parametrize("found", ["slower plans", "no plan"])
def test_the_present_plan_is_kept_if_no_other_is_faster(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = machines("fast", "fast", devices_per_node=1)
    plan = make_plans(topology, profile(), global_batch=16)[0].plan
    slower = RankedPlan(slowed(plan, {0: 1.1}), "")

    def search(*_: object, **__: object) -> object:
        if found == "no plan":
            raise ValueError("no plan fits")
        return Answer((slower,))

    monkeypatch.setattr(replan_module, "search", search)
    result = replan(topology, profile(), plan, {0: 1.01})
    assert result.best is result.present and not result.changed


def test_files_of_another_plan_are_refused() -> None:
    topology = machines("fast", "fast", devices_per_node=1)
    plan = make_plans(topology, profile(), global_batch=16)[0].plan
    with pytest.raises(ValueError, match="rank 1, but the cluster has only ranks 0 to 0"):
        replan(machines("fast", devices_per_node=1), profile(), plan, {1: 2.0})
    with pytest.raises(ValueError, match="6 blocks, but the profile model has 4"):
        replan(topology, profile(blocks=4), plan, {1: 2.0})
    with pytest.raises(ValueError, match="rank 5 is not in the plan"):
        replan(topology, profile(), plan, {5: 2.0})
