"""Given plans and layouts: priced as by the search; lines written and read back, errors that point to a column."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
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
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.simulate import simulate_plan
from colossal_hetero.planner.profile.layer_profile import load_profile
from tests.support.paths import REPOSITORY
from tests.support.planning import make_plans
from tests.support.random_clusters import large_problem, small_problem, whole_space_problem
from tests.support.random_examples import IS_THOROUGH

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


def test_slow_devices_are_left_out() -> None:
    devices = list(CLUSTER.devices)
    for slow in (4, 9):
        devices[slow] = dataclasses.replace(devices[slow], speed=0.5)
    throttled = dataclasses.replace(CLUSTER, devices=tuple(devices))
    line = read_layout("dp 3 x pp [2 x V100-16 0-23], micro-batch 1 x 8")
    used = {
        rank for row in evaluate_layout(throttled, PROFILE, line).plan.rank_order for ranks in row for rank in ranks
    }
    assert used == set(range(4, 12)) - {4, 9}


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


def test_the_parts_of_a_line() -> None:
    read = read_layout("tp 2 · dp 4 × pp [2 × V100-16 0-9 | A100-40 10-23]")
    each = pipeline(("V100-16", 0, 4), ("V100-16", 5, 9), ("A100-40", 10, 23))
    assert read == PlanLayout((each,) * 4, tensor_parallel=2)
    assert read.blocks == 24
    unequal = read_layout("pp [A 0-3 | B 4-5] x 12; 2 x pp [3 * T4 0-5] x 4, micro-batch 2")
    assert unequal.pipelines[0] == pipeline(("A", 0, 3), ("B", 4, 5), micro_batches=12)
    assert unequal.pipelines[1:] == (pipeline(("T4", 0, 1), ("T4", 2, 3), ("T4", 4, 5), micro_batches=4),) * 2
    assert (unequal.micro_batch, unequal.tensor_parallel) == (2, 1)
    one = read_layout("[A100-40 0-23], micro-batch 2 x 8 · 1.230 s (26.02 samples/s)")
    assert one == PlanLayout((pipeline(("A100-40", 0, 23), micro_batches=8),), 2)
    for form in ("(recompute)", "recompute", "( RECOMPUTE )"):
        assert read_layout(f"[V100 {form} 0-3]").pipelines[0].stages == (StageLayout("V100", ((0, 4),), True),)
    assert read_layout("tp 2, ZeRO 1, [V100 (big) 0-3]").pipelines[0].stages[0].device == "V100 (big)"


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
