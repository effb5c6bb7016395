"""How sure predictions are, compared with profiles whose times are changed at random, and the order of ties."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from colossal_hetero.planner.cost.plan import Plan, load_plan, save_plan
from colossal_hetero.planner.cost.ranked_plan import RankedPlan, difference_error, prediction_error, ties_resolved
from colossal_hetero.planner.profile.layer_profile import LayerTimes, ModelProfile
from tests.support.planning import make_plans, predict_plan
from tests.unit.planner.plans.test_predict import machines, profile

pytestmark = pytest.mark.unit

ERRORS = {"fast": 0.01, "slow": 0.02}
DRAWS = 400


def with_errors(known: ModelProfile, errors: dict[str, float]) -> ModelProfile:
    times = tuple(each.model_copy(update={"relative_error": errors[each.device]}) for each in known.times)
    return known.model_copy(update={"times": times})


def drawn(known: ModelProfile, seed: int) -> ModelProfile:
    """The profile with each entry's times multiplied by a random factor of its standard error."""
    random = np.random.default_rng(seed)

    def changed(entry: LayerTimes) -> LayerTimes:
        factor = math.exp(entry.relative_error * random.normal())
        fields = ("forward_seconds", "backward_seconds", "update_seconds")
        return entry.model_copy(update={name: tuple(factor * s for s in getattr(entry, name)) for name in fields})

    return ModelProfile(**{**dict(known), "times": tuple(map(changed, known.times))})


LAYOUTS: dict[str, dict[str, Any]] = {
    "a pipeline of both kinds": dict(ranks=[[[0], [2]]], bounds=(0, 2, 6), micro_batch=2),
    "another cut": dict(ranks=[[[0], [2]]], bounds=(0, 1, 6), micro_batch=2),
    "smaller micro-batches": dict(ranks=[[[0], [2]]], bounds=(0, 2, 6), micro_batch=1),
    "replicas": dict(ranks=[[[0], [2]], [[1], [3]]], bounds=(0, 2, 6), micro_batch=2),
    "one kind": dict(ranks=[[[2], [3]]], bounds=(0, 3, 6), micro_batch=2),
    "groups of two": dict(ranks=[[[0, 1], [2, 3]]], bounds=(0, 2, 6), micro_batch=2),
}


def predicted(known: ModelProfile, layout: str) -> Plan:
    options = dict(LAYOUTS[layout])
    return predict_plan(machines("slow", "fast"), known, options.pop("ranks"), global_batch=16, **options)


@pytest.fixture(scope="module")
def logarithms() -> dict[str, np.ndarray]:
    """Logarithms of the predicted times by layout, for profiles that are drawn at random."""
    known = with_errors(profile(), ERRORS)
    draws = [drawn(known, seed) for seed in range(DRAWS)]
    return {layout: np.log([predicted(each, layout).iteration_seconds for each in draws]) for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prediction_and_a_difference_are_as_sure_as_random_profiles_say(
    layout: str, logarithms: dict[str, np.ndarray]
) -> None:
    known, first = with_errors(profile(), ERRORS), "a pipeline of both kinds"
    error = prediction_error(predicted(known, layout), known)
    assert error == pytest.approx(logarithms[layout].std(), rel=0.15)
    difference = difference_error(predicted(known, first), predicted(known, layout), known)
    assert difference == pytest.approx((logarithms[layout] - logarithms[first]).std(), rel=0.15, abs=1e-12)


def test_sums_of_gradients_are_not_unsure() -> None:
    """Half of the time is sums of gradients, which the profile does not measure: half of the error."""
    known = with_errors(profile(), {"fast": 0.01, "slow": 0.01})
    alone = predict_plan(machines("fast"), known, [[[0]]], micro_batch=2, global_batch=16)
    half = alone.model_copy(update={"synchronization_seconds": alone.iteration_seconds})
    assert alone.synchronization_seconds == 0 and prediction_error(alone, known) == pytest.approx(0.01, rel=0.1)
    assert prediction_error(half, known) == pytest.approx(prediction_error(alone, known) / 2, rel=0.01)
    # With an optimizer's step as long as the passes, which is measured too, two thirds.
    (replica,), seconds = alone.replicas, alone.iteration_seconds
    passes = seconds - replica.stages[0].update_seconds
    stage = replica.stages[0].model_copy(update={"update_seconds": passes})
    updates = {"replicas": (replica.model_copy(update={"stages": (stage,)}),), "synchronization_seconds": passes}
    two_thirds = prediction_error(alone, known) * 2 / 3
    assert prediction_error(alone.model_copy(update=updates), known) == pytest.approx(two_thirds, rel=0.01)


def test_the_simplest_of_the_plans_that_are_tied_comes_first() -> None:
    topology = machines("slow", "fast")
    exact = make_plans(topology, profile(), global_batch=16, keep=8)
    unsure = make_plans(topology, with_errors(profile(), {"fast": 0.5, "slow": 0.5}), global_batch=16, keep=8)
    assert [each.plan.iteration_seconds for each in exact] == sorted(each.plan.iteration_seconds for each in exact)
    assert all(each.plan.relative_error is None for each in exact)
    first = unsure[0]
    assert first.plan.relative_error is not None and 0 < first.plan.relative_error < 1
    assert first.plan.symmetric and not exact[0].plan.symmetric
    assert first.plan.iteration_seconds > exact[0].plan.iteration_seconds
    assert first.reason.startswith("the simplest of ")
    assert unsure[1].plan.replicas == exact[0].plan.replicas
    assert "a tie" in unsure[2].reason


def test_plans_that_are_not_tied_stay_in_their_order() -> None:
    known = with_errors(profile(), {"fast": 1e-6, "slow": 1e-6})
    plans = [RankedPlan(predicted(known, layout), "") for layout in LAYOUTS]
    plans.sort(key=lambda each: each.plan.iteration_seconds)
    assert ties_resolved(plans, known) == plans


def test_the_error_is_in_the_file_only_if_it_is_known(tmp_path) -> None:
    plan = predicted(profile(), "replicas")
    save_plan(plan, tmp_path / "plan.json")
    assert "relative_error" not in (tmp_path / "plan.json").read_text()
    sure = plan.model_copy(update={"relative_error": 0.01})
    save_plan(sure, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == sure
