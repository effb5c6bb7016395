"""Predictions for given ranks: by hand, and how sure they are, from profiles whose times are changed at random."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from colossal_hetero.planner.cost.plan import Plan, exposed_seconds
from colossal_hetero.planner.cost.ranked_plan import difference_error, prediction_error
from colossal_hetero.planner.profile.fitted_profiles import as_profiled
from colossal_hetero.planner.profile.layer_profile import LayerTimes, ModelProfile
from tests.support.planning import make_plans, predict_plan
from tests.support.two_speeds import MB, machines, profile


def test_a_pipeline_costs_what_the_formula_says():
    schedule = {"fast": 0.02, "slow": 0.1}
    rows = tuple(each.model_copy(update={"schedule_seconds": schedule[each.device]}) for each in profile().times)
    topology, mine = machines("slow", "fast", devices_per_node=1), profile().model_copy(update={"times": rows})
    plan = predict_plan(topology, mine, [[[0], [1]]], bounds=(0, 1, 6), micro_batch=2, global_batch=16)
    # Stage 0 has 2 layers (embedding, 1 block), stage 1 has 6 (5 blocks, head); backward takes twice the forward time.
    slow, fast = 2 * 2 * 0.09 + 0.1, 6 * 2 * 0.03 + 0.02
    hop = 2 * MB / 1e9
    assert plan.replicas[0].micro_batches == 8 and plan.synchronization_seconds == 0
    assert plan.iteration_seconds == pytest.approx(slow + fast + 2 * hop + 7 * (max(slow, fast) + hop))
    stages = plan.replicas[0].stages
    assert [(stage.ranks, stage.device) for stage in stages] == [((0,), "slow"), ((1,), "fast")]
    assert [stage.schedule_seconds for stage in stages] == pytest.approx([0.1, 0.02])
    # Each of two layers has 4 × 8 MB of state and, for each of two micro-batches, 2 samples × 1 MB of activations. In
    # backward, a layer needs twice what it keeps of one micro-batch.
    assert stages[0].memory_overhead_bytes == pytest.approx(2 * 2 * MB)
    assert stages[0].memory_bytes == pytest.approx(2 * (4 * 8 * MB + 2 * 2 * MB) + 2 * 2 * MB)


def test_a_group_of_two_kinds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(0, 2\) \(fast, slow\) are not a tensor-parallel group"):
        predict_plan(machines("slow", "fast"), profile(), [[[0, 2], [1, 3]]], micro_batch=2, global_batch=16)


def test_devices_get_the_names_of_the_profile():
    topology = machines("fast", devices_per_node=3)
    renamed = {"fast": "fast", "slow": "fast-2"}
    measured = profile()
    measured = measured.model_copy(
        update={
            "times": tuple(times.model_copy(update={"device": renamed[times.device]}) for times in measured.times),
            "rank_devices": ("fast", "fast-2", "fast"),
        }
    )
    # The measured times of the second device contain its slowness, so its speed must not count a second time.
    slow = dataclasses.replace(topology.devices[1], speed=0.25)
    topology = dataclasses.replace(topology, devices=(topology.devices[0], slow, topology.devices[2]))
    called = as_profiled(topology, measured)
    assert [device.speed for device in called.devices] == [1.0] * 3
    assert [device.kind.name for device in called.devices] == ["fast", "fast-2", "fast"]
    assert [device.kind.memory_bytes for device in called.devices] == [10**10] * 3
    # A profile of other ranks or devices, or one without rank_devices, changes nothing.
    assert as_profiled(machines("fast"), measured) == machines("fast")
    assert as_profiled(machines("slow", devices_per_node=3), measured) == machines("slow", devices_per_node=3)
    assert as_profiled(topology, profile()) == topology


def test_at_least_the_measured_context_is_reserved():
    topology = machines("fast", "slow")
    measured = profile(context_bytes={"slow": 10**9})
    reserves = {
        device.kind.name: device.kind.memory_reserve_bytes for device in as_profiled(topology, measured).devices
    }
    assert reserves == {"fast": 0, "slow": 10**9}
    generous = topology.with_memory_reserve(2 * 10**9)
    assert as_profiled(generous, measured) == generous
    plan = make_plans(machines("slow"), measured, global_batch=4)[0].plan
    assert all(stage.memory_overhead_bytes >= 10**9 for each in plan.replicas for stage in each.stages)
    with pytest.raises(ValueError, match=r"20 GB of slow are in use .* gives it 10 GB of memory; correct one"):
        make_plans(topology, profile(context_bytes={"slow": 2 * 10**10}), global_batch=4)


@pytest.mark.parametrize(
    ("synchronization", "passes", "equal", "expected"),
    [
        (0.0, [(1.0, 2.0)], True, 0.0),
        (2.0, [(1.0, 2.0)], True, 0.0),
        # 3 s of gradients behind 2 s, and 3 s of parameters behind 1 s.
        (6.0, [(1.0, 2.0)], True, 3.0),
        # The second stage hides 1 s less of each.
        (6.0, [(1.0, 2.0), (0.0, 1.0)], True, 5.0),
        # A long backward pass does not hide parameters.
        (4.0, [(0.5, 100.0)], True, 1.5),
        (4.0, [(0.0, 0.0)], True, 4.0),
        # Of replicas that are not alike, parameters are gathered after the step.
        (6.0, [(1.0, 2.0)], False, 1.0 + 3.0),
    ],
)
def test_passes_hide_what_is_not_longer(
    synchronization: float, passes: list[tuple[float, float]], equal: bool, expected: float
) -> None:
    assert exposed_seconds(synchronization, passes, equal=equal) == pytest.approx(expected)


def test_a_prediction_counts_what_is_not_hidden() -> None:
    topology, ranks = machines("fast", "slow", bandwidth=1e8), [[[0], [1]], [[2], [3]]]
    sizes = dict(micro_batch=1, global_batch=8, bounds=[0, 4, 6])
    plain, overlapped = (predict_plan(topology, profile(), ranks, **sizes, overlap=on) for on in (False, True))
    stages = [stage for replica in plain.replicas for stage in replica.stages]
    passes = [(stage.forward_seconds, stage.backward_seconds) for stage in stages]
    expected = exposed_seconds(plain.synchronization_seconds, passes)
    assert overlapped.synchronization_seconds == pytest.approx(expected)
    assert 0 < expected < plain.synchronization_seconds
    pipelines = plain.iteration_seconds - plain.synchronization_seconds
    assert overlapped.iteration_seconds == pytest.approx(pipelines + expected)
    best = make_plans(topology, profile(), global_batch=8, overlap=True)[0].plan
    assert best.iteration_seconds <= make_plans(topology, profile(), global_batch=8)[0].plan.iteration_seconds
    with pytest.raises(ValueError, match="1f1b only, not for 1f1b, zbv"):
        make_plans(topology, profile(), global_batch=8, schedules=("1f1b", "zbv"), overlap=True)


ERRORS = {"fast": 0.01, "slow": 0.02}
DRAWS = 200


def with_errors(known: ModelProfile, errors: dict[str, float]) -> ModelProfile:
    times = tuple(each.model_copy(update={"relative_error": errors[each.device]}) for each in known.times)
    return known.model_copy(update={"times": times})


def unsure_profile() -> ModelProfile:
    """Also with updates of the optimizer, which are measured as passes are; sums of gradients are not."""
    known = with_errors(profile(), ERRORS)
    times = tuple(each.model_copy(update={"update_seconds": each.backward_seconds}) for each in known.times)
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
    known = unsure_profile()
    draws = [drawn(known, seed) for seed in range(DRAWS)]
    return {layout: np.log([predicted(each, layout).iteration_seconds for each in draws]) for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prediction_and_a_difference_are_as_sure_as_random_profiles_say(
    layout: str, logarithms: dict[str, np.ndarray]
) -> None:
    known, first = unsure_profile(), "a pipeline of both kinds"
    error = prediction_error(predicted(known, layout), known)
    assert error == pytest.approx(logarithms[layout].std(), rel=0.15)
    difference = difference_error(predicted(known, first), predicted(known, layout), known)
    assert difference == pytest.approx((logarithms[layout] - logarithms[first]).std(), rel=0.15, abs=1e-12)


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
