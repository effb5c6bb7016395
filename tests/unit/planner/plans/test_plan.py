"""Plan files: saving and loading, with chunks or not; what is wrong with one; values that are computed from a plan."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colossal_hetero.planner.cost.plan import Plan, Replica, StagePlan, load_plan, save_plan
from colossal_hetero.planner.cost.runnable import why_not_runnable
from tests.support.plans import RANGES, chunked, plan, replica, stage

seconds = st.floats(0, 1e4, allow_nan=False)
names = st.text(min_size=1, max_size=8)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Random plans: any split into stages, ranks in any order, any characters in texts."""
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
