"""What remains of synchronization between replicas if passes hide it, against times computed by hand."""

from __future__ import annotations

import pytest

from colossal_hetero.planner.cost.plan import exposed_seconds
from tests.support.planning import make_plans, predict_plan
from tests.unit.planner.plans.test_predict import machines, profile


@pytest.mark.parametrize(
    ("synchronization", "passes", "expected"),
    [
        (0.0, [(1.0, 2.0)], 0.0),
        (2.0, [(1.0, 2.0)], 0.0),
        # 3 s of gradients behind 2 s, and 3 s of parameters behind 1 s.
        (6.0, [(1.0, 2.0)], 3.0),
        # The second stage hides 1 s less of each.
        (6.0, [(1.0, 2.0), (0.0, 1.0)], 5.0),
        # A long backward pass does not hide parameters.
        (4.0, [(0.5, 100.0)], 1.5),
        (4.0, [(0.0, 0.0)], 4.0),
    ],
)
def test_passes_hide_what_is_not_longer(
    synchronization: float, passes: list[tuple[float, float]], expected: float
) -> None:
    assert exposed_seconds(synchronization, passes) == pytest.approx(expected)


def test_a_prediction_counts_what_is_not_hidden() -> None:
    topology, layers = machines("fast", "slow", bandwidth=1e8), profile()
    ranks = [[[0], [1]], [[2], [3]]]
    degrees = dict(micro_batch=1, global_batch=8, bounds=[0, 4, 6])
    plain, overlapped = (predict_plan(topology, layers, ranks, **degrees, overlap=on) for on in (False, True))
    half = plain.synchronization_seconds / 2
    expected = max(
        max(half - stage.forward_seconds, 0) + max(half - stage.backward_seconds, 0)
        for replica in plain.replicas
        for stage in replica.stages
    )
    assert 0 < overlapped.synchronization_seconds == pytest.approx(expected)
    assert overlapped.synchronization_seconds < plain.synchronization_seconds
    pipelines = plain.iteration_seconds - plain.synchronization_seconds
    assert overlapped.iteration_seconds == pytest.approx(pipelines + expected)


def test_the_search_predicts_as_a_given_plan_is_predicted() -> None:
    topology, layers = machines("fast", "fast", bandwidth=1e8), profile()
    best = make_plans(topology, layers, global_batch=8, overlap=True)[0].plan
    ranks = [[list(stage.ranks) for stage in replica.stages] for replica in best.replicas]
    bounds = [0, *(stage.blocks[1] for stage in best.replicas[0].stages)]
    again = predict_plan(
        topology, layers, ranks, micro_batch=best.micro_batch, global_batch=8, bounds=bounds, overlap=True
    )
    assert len(best.replicas) > 1
    assert again.iteration_seconds == pytest.approx(best.iteration_seconds)
    assert best.iteration_seconds <= make_plans(topology, layers, global_batch=8)[0].plan.iteration_seconds


def test_other_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="1f1b only, not for 1f1b, zbv"):
        make_plans(machines("fast"), profile(), global_batch=8, schedules=("1f1b", "zbv"), overlap=True)
