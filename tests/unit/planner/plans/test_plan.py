"""Plans: files, computed values, predictions, how sure they are; given plans and layouts, priced as by the search."""

import dataclasses
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colossal_hetero.common.text import MarkedError
from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.cost.evaluate import evaluate_layout, evaluate_plan, why_other_devices
from colossal_hetero.planner.cost.layout_line import (
    PipelineLayout,
    PlanLayout,
    StageLayout,
    layout_of,
    read_layout,
    write_layout,
)
from colossal_hetero.planner.cost.plan import Plan, Replica, StagePlan, exposed_seconds, load_plan, save_plan
from colossal_hetero.planner.cost.ranked_plan import difference_error, prediction_error
from colossal_hetero.planner.cost.runnable import why_not_runnable
from colossal_hetero.planner.cost.simulate import simulate_plan
from colossal_hetero.planner.profile.fitted_profiles import as_profiled
from colossal_hetero.planner.profile.layer_profile import LayerTimes, ModelProfile, load_profile
from tests.support.paths import REPOSITORY
from tests.support.planning import make_plans, predict_plan
from tests.support.plans import RANGES, chunked, plan, replica, stage
from tests.support.random_clusters import large_problem, small_problem, whole_space_problem
from tests.support.random_examples import IS_THOROUGH
from tests.support.two_speeds import machines, profile

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


def test_ranks_are_renumbered_where_devices_are_left_out() -> None:
    assert plan().launched_order == plan().rank_order == (((0,), (1,)), ((2,), (3,)))
    some = plan(replica(stage(0, 3, (9, 4)), stage(3, 6, (2, 7))))
    assert some.launched_order == (((3, 1), (0, 2)),)
    assert some.world_size == 4


@pytest.mark.parametrize("schedule", RANGES)
def test_plans_with_chunks_that_colossalai_does_not_run(schedule: str) -> None:
    assert why_not_runnable(chunked(schedule)) is None
    problem = why_not_runnable(chunked(schedule, micro_batches=7)) or ""
    assert "7 micro-batches for 2 stages" in problem and "multiple" in problem
    first, second = chunked(schedule).replicas[0].stages
    again = replica(first, second.model_copy(update={"recompute": True}))
    message = why_not_runnable(chunked(schedule).model_copy(update={"replicas": (again,)})) or ""
    assert "stage 1 of replica 0 runs its forward passes again" in message and f"not with {schedule}" in message


def test_devices_get_the_names_of_the_profile():
    topology = machines("fast", devices_per_node=3)
    renamed = {"fast": "fast", "slow": "fast-2"}
    times = tuple(each.model_copy(update={"device": renamed[each.device]}) for each in profile().times)
    measured = profile().model_copy(update={"times": times, "rank_devices": ("fast", "fast-2", "fast")})
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
    kinds = {device.kind for device in as_profiled(topology, measured).devices}
    assert {kind.name: kind.memory_reserve_bytes for kind in kinds} == {"fast": 0, "slow": 10**9}
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


EXAMPLES = REPOSITORY / "examples/plans"


CLUSTER = load_cluster(EXAMPLES / "clusters/a100-v100.toml")
PROFILE = load_profile(EXAMPLES / "opt-350-a100-v100.json")


def same_times(one: Plan, other: Plan) -> bool:
    def numbers(plan: Plan) -> list[float]:
        stages = [stage for replica in plan.replicas for stage in replica.stages]
        return [plan.iteration_seconds, plan.synchronization_seconds] + [
            value
            for stage in stages
            for value in (stage.forward_seconds, stage.transfer_seconds, stage.memory_bytes, stage.update_seconds)
        ]

    return bool(np.allclose(numbers(one), numbers(other), rtol=1e-9, atol=0))


@pytest.mark.parametrize(
    ("make", "wishes"),
    [
        (small_problem, {"schedules": ("1f1b", "zbv")}),
        (small_problem, {"schedules": ("interleaved",)}),
        (whole_space_problem, {"recompute": True, "zero_stages": (0, 1)}),
        (large_problem, {}),
    ],
)
def test_the_planners_plans_and_their_lines_cost_the_same(make, wishes):
    used = set[str]()
    for seed in range(4, 40 if IS_THOROUGH else 9):
        topology, profile, global_batch = make(seed)
        try:
            plans = make_plans(topology, profile, global_batch=global_batch, keep=3, **wishes)
        except ValueError:
            continue
        for ranked in plans:
            used.add(ranked.plan.schedule)
            evaluated = evaluate_plan(topology, profile, ranked.plan)
            assert same_times(evaluated.plan, ranked.plan)
            assert evaluated.simulated_seconds == simulate_plan(evaluated.plan).seconds
            assert evaluated.fits and evaluated.problem is None
            if make is not large_problem:
                # With few devices, exchanges find slots that are at least as good.
                line = write_layout(layout_of(ranked.plan))
                evaluated = evaluate_layout(topology, profile, read_layout(line))
                assert layout_of(evaluated.plan) == layout_of(ranked.plan)
                assert evaluated.plan.iteration_seconds <= ranked.plan.iteration_seconds * (1 + 1e-8), line
    assert used == set(wishes.get("schedules", ("1f1b",)))


def test_micro_batches_are_divided_for_the_earliest_end() -> None:
    line = "dp 2 = pp [A100-40 0-23] + pp [4 x V100-16 0-23], micro-batch 2"
    free = evaluate_layout(CLUSTER, PROFILE, read_layout(line), global_batch=48).plan
    assert sum(replica.micro_batches for replica in free.replicas) == 24
    others = []
    for first in range(1, 21):
        given = read_layout(f"pp [A100-40 0-23] x {first} + pp [4 x V100-16 0-23] x {24 - first}, micro-batch 2")
        others.append(evaluate_layout(CLUSTER, PROFILE, given).plan.iteration_seconds)
    assert free.iteration_seconds == pytest.approx(min(others), rel=1e-9)
    alike = evaluate_layout(CLUSTER, PROFILE, read_layout("dp 4 x [A100-40 0-23], micro-batch 2"), global_batch=64)
    assert [replica.micro_batches for replica in alike.plan.replicas] == [8] * 4


def test_what_does_not_fit_is_priced_and_named() -> None:
    evaluated = evaluate_layout(CLUSTER, PROFILE, read_layout("dp 2 x pp [V100-16 0-23], micro-batch 4 x 8"))
    assert not evaluated.fits
    assert [(replica, stage) for replica, stage, _ in evaluated.too_large] == [(0, 0), (1, 0)]
    assert evaluated.fullest.memory_bytes > evaluated.fullest.memory_available_bytes
    few = evaluate_layout(CLUSTER, PROFILE, read_layout("dp 1 x pp [4 x V100-16 0-23], micro-batch 1 x 2"))
    assert few.problem is not None and "2 micro-batches for 4 stages" in few.problem


def test_plans_of_other_machines() -> None:
    plan = evaluate_layout(CLUSTER, PROFILE, read_layout("dp 2 x pp [4 x V100-16 0-23], micro-batch 1 x 8")).plan
    assert why_other_devices(CLUSTER, plan) is None
    smaller = dataclasses.replace(CLUSTER, devices=CLUSTER.devices[:8], nodes=CLUSTER.nodes[:2])
    problem = why_other_devices(smaller, plan)
    assert problem is not None and "the cluster has only ranks 0 to 7" in problem
    with pytest.raises(ValueError, match="the cluster has only ranks 0 to 7"):
        evaluate_plan(smaller, PROFILE, plan)


DEVICES = ("A100-40", "V100-16", "3090", "x-2", "Xeon 2.4 GHz", "tp-kind")


def pipeline(*stages: tuple[str, int, int], micro_batches: int | None = None) -> PipelineLayout:
    """Stages by device, first block and last block."""
    return PipelineLayout(
        tuple(StageLayout(device, ((first, last + 1),)) for device, first, last in stages), micro_batches
    )


@st.composite
def layouts(draw: st.DrawFn) -> PlanLayout:
    blocks = draw(st.integers(1, 12))
    all_say_counts = draw(st.booleans())

    def stages() -> tuple[StageLayout, ...]:
        inner = draw(st.sets(st.integers(1, blocks - 1), max_size=6)) if blocks > 1 else set()
        bounds = [0, *sorted(inner), blocks]
        return tuple(
            StageLayout(draw(st.sampled_from(DEVICES)), ((a, b),), draw(st.booleans()))
            for a, b in itertools.pairwise(bounds)
        )

    pipelines: list[PipelineLayout] = []
    for _ in range(draw(st.integers(1, 3))):
        each = PipelineLayout(stages(), draw(st.integers(1, 64)) if all_say_counts else None)
        pipelines += [each] * draw(st.integers(1, 3))
    size = draw(st.integers(1, 8)) if all_say_counts else None
    zero = draw(st.sampled_from((0, 1)))
    return PlanLayout(tuple(pipelines), size, "1f1b", zero, draw(st.sampled_from((1, 2))))


@given(layouts())
def test_what_is_written_is_read_back(layout: PlanLayout) -> None:
    """Also in ASCII, and in upper case."""
    line = write_layout(layout)
    read = read_layout(line)
    assert Counter(read.pipelines) == Counter(layout.pipelines)
    fields = ("micro_batch", "zero_stage", "tensor_parallel")
    assert [getattr(read, name) for name in fields] == [getattr(layout, name) for name in fields]
    for times, dot in (("x", ","), ("*", ";")):
        ascii_line = line.replace("×", times).replace(" ·", dot)
        assert ascii_line.isascii() and read_layout(ascii_line) == read
        assert read_layout(ascii_line.upper().replace("PP [", "[")).micro_batch == layout.micro_batch


def test_the_pointer_shows_the_place_in_a_long_line() -> None:
    stages = " | ".join(f"A {block}" for block in range(200))
    line = f"dp 1 × pp [{stages} | B 201]"
    with pytest.raises(MarkedError) as caught:
        read_layout(line)
    shown, mark = caught.value.pointer.split("\n")
    assert len(shown) < 120 and shown[mark.index("^") :].startswith("B 201")


@given(st.text(alphabet="tpdx0123459 ×[]|+;·,-…=AB\n", max_size=60))
def test_no_text_ends_in_another_error(text: str) -> None:
    try:
        read = read_layout(text)
    except MarkedError as error:
        assert 0 <= error.place <= len(text)
    else:
        assert read_layout(write_layout(read)).pipelines
