"""Plan files and values that are computed from a plan; predictions for given ranks, and how sure they are."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colossal_hetero.planner.cost.plan import Plan, Replica, StagePlan, exposed_seconds, load_plan, save_plan
from colossal_hetero.planner.cost.ranked_plan import difference_error, prediction_error
from colossal_hetero.planner.cost.runnable import why_not_runnable
from colossal_hetero.planner.profile.fitted_profiles import as_profiled
from colossal_hetero.planner.profile.layer_profile import LayerTimes, ModelProfile
from tests.support.planning import make_plans, predict_plan
from tests.support.plans import RANGES, chunked, plan, replica, stage
from tests.support.two_speeds import MB, machines, profile

seconds = st.floats(0, 1e4, allow_nan=False)
names = st.text(min_size=1, max_size=8)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    blocks, degree = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    cuts = draw(st.lists(st.lists(st.integers(1, max(blocks - 1, 1)), unique=True, max_size=3), min_size=1, max_size=4))
    bounds = [(0, *sorted(cut for cut in own if cut < blocks), blocks) for own in cuts]
    ranks = iter(draw(st.permutations(range(degree * sum(len(own) - 1 for own in bounds)))))
    size = draw(st.integers(1, 64))
    fields = [name for name in StagePlan.model_fields if name.endswith(("_seconds", "_bytes"))]
    replicas = []
    for own in bounds:
        stages = tuple(
            stage(
                *(a, b, [next(ranks) for _ in range(degree)], draw(names)),
                node=draw(names),
                **{name: draw(seconds) for name in fields},
            )
            for a, b in itertools.pairwise(own)
        )
        count = draw(st.integers(1, 99))
        replicas.append(Replica(stages=stages, micro_batches=count, pipeline_seconds=draw(seconds)))
    return plan(
        *replicas,
        model=draw(names),
        method=draw(names),
        micro_batch=size,
        global_batch=size * sum(r.micro_batches for r in replicas),
        synchronization_seconds=draw(seconds),
        iteration_seconds=draw(st.floats(1e-6, 1e6)),
        uniform_seconds=draw(st.none() | st.floats(1e-6, 1e6)),
        notes=tuple(draw(st.lists(st.text(alphabet='[]{}", :\n\\aé', max_size=30), max_size=3))),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans())
def test_a_saved_plan_loads_unchanged(tmp_path: Path, made: Plan) -> None:
    path = tmp_path / "plan.json"
    save_plan(made, path)
    assert load_plan(path) == made
    assert list(tmp_path.iterdir()) == [path]


def test_the_slowest_stage_waits_only_while_the_pipeline_fills_and_empties() -> None:
    made = replica(
        stage(0, 1, (0,), forward_seconds=1.0, backward_seconds=2.0, transfer_seconds=0.5, update_seconds=0.0),
        stage(1, 2, (1,), forward_seconds=0.5, backward_seconds=1.0, transfer_seconds=0.5, update_seconds=0.0),
        micro_batches=4,
    )
    # 3.5 + 2 + 3 × 3.5 seconds, of which the stages work 4 × 3.5 and 4 × 2.
    assert made.pipeline_seconds == 16
    assert made.bubble_shares == pytest.approx((2 / 16, 8 / 16))


def test_plans_are_symmetric_if_their_replicas_have_equal_splits() -> None:
    assert plan().symmetric and plan().layers_per_stage == (4, 2)
    kinds = plan(replica(stage(0, 6, (0,), "A100-40")), replica(stage(0, 6, (1,), "T4")))
    assert kinds.symmetric
    assert not plan(replica(stage(0, 6, (0,))), replica(stage(0, 6, (1,)), micro_batches=4)).symmetric
    assert not plan(
        replica(stage(0, 3, (0,)), stage(3, 6, (1,))), replica(stage(0, 2, (2,)), stage(2, 6, (3,)))
    ).symmetric


def test_ranks_are_renumbered_where_devices_are_left_out() -> None:
    assert plan().launched_order == plan().rank_order == (((0,), (1,)), ((2,), (3,)))
    some = plan(replica(stage(0, 3, (9, 4)), stage(3, 6, (2, 7))))
    assert some.launched_order == (((3, 1), (0, 2)),)
    assert some.world_size == 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputation_and_zero_are_in_files_of_plans_that_use_them(tmp_path: Path, precision: str) -> None:
    path = tmp_path / "plan.json"
    stages = stage(0, 4, (0, 1)), stage(4, 6, (2, 3), recompute=True)
    made = plan(replica(*stages), tensor_parallel=2, zero_stage=1, precision=precision)
    assert why_not_runnable(made) is None
    save_plan(made, path)
    assert load_plan(path) == made
    save_plan(plan(), path)
    content = json.loads(path.read_text())
    assert content["schedule"] == "1f1b" and not {"zero_stage", "order_seconds"} & content.keys()
    stages = content["replicas"][0]["stages"]
    assert all("blocks" in each and not {"recompute", "chunks"} & each.keys() for each in stages)


@pytest.mark.parametrize("schedule", RANGES)
def test_a_saved_plan_with_chunks_loads_unchanged(tmp_path: Path, schedule: str) -> None:
    made = chunked(schedule)
    save_plan(made, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == made
    content = json.loads((tmp_path / "plan.json").read_text())
    assert "blocks" not in content["replicas"][0]["stages"][0]
    assert made.layers_per_chunk == (2, 1, 2, 1) and made.layers_per_stage == ((4, 2) if schedule != "zbv" else (3, 3))
    assert made.replicas[0].hop_seconds == (0.002, 0.002, 0.002)
    assert (made.chunks_per_stage, made.symmetric) == (2, True)


@pytest.mark.parametrize("schedule", RANGES)
def test_plans_with_chunks_that_colossalai_does_not_run(schedule: str) -> None:
    assert why_not_runnable(chunked(schedule)) is None
    problem = why_not_runnable(chunked(schedule, micro_batches=7)) or ""
    assert "7 micro-batches for 2 stages" in problem and "multiple" in problem
    first, second = chunked(schedule).replicas[0].stages
    again = replica(first, second.model_copy(update={"recompute": True}))
    message = why_not_runnable(chunked(schedule).model_copy(update={"replicas": (again,)})) or ""
    assert "stage 1 of replica 0 runs its forward passes again" in message and f"not with {schedule}" in message


def test_a_pipeline_costs_what_the_formula_says():
    topology = machines("slow", "fast", devices_per_node=1)
    plan = predict_plan(topology, profile(), [[[0], [1]]], bounds=(0, 1, 6), micro_batch=2, global_batch=16)
    # Stage 0 has 2 layers (embedding, 1 block), stage 1 has 6 (5 blocks, head); backward takes twice the forward time.
    slow, fast = 2 * 2 * 0.09, 6 * 2 * 0.03
    hop = 2 * MB / 1e9
    assert plan.replicas[0].micro_batches == 8 and plan.synchronization_seconds == 0
    assert plan.iteration_seconds == pytest.approx(slow + fast + 2 * hop + 7 * (max(slow, fast) + hop))
    stages = plan.replicas[0].stages
    assert [(stage.ranks, stage.device) for stage in stages] == [((0,), "slow"), ((1,), "fast")]
    # Each of two layers has 4 × 8 MB of state and, for each of two micro-batches, 2 samples × 1 MB of activations. In
    # backward, a layer needs twice what it keeps of one micro-batch.
    assert stages[0].memory_overhead_bytes == pytest.approx(2 * 2 * MB)
    assert stages[0].memory_bytes == pytest.approx(2 * (4 * 8 * MB + 2 * 2 * MB) + 2 * 2 * MB)


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


def test_passes_hide_what_is_not_longer() -> None:
    for synchronization, passes, equal, expected in (
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
    ):
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
    known = unsure_profile()
    draws = [drawn(known, seed) for seed in range(DRAWS)]
    return {layout: np.log([predicted(each, layout).iteration_seconds for each in draws]) for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prediction_and_a_difference_are_as_sure_as_random_profiles_say(layout, logarithms):
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
