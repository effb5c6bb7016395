"""Plans whose stages hold several chunks: their file, and what is wrong with one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colossal_hetero.planner.cost.pass_order import GraphSeconds
from colossal_hetero.planner.cost.plan import ChunkPlan, Plan, StagePlan, load_plan, save_plan
from colossal_hetero.planner.cost.runnable import why_not_runnable
from tests.support.changed_files import error_after, put
from tests.unit.planner.plans.test_plan import plan, replica, stage

GRAPH = GraphSeconds(forward=0.01, input_gradient=0.01, weight_gradient=0.01, transfer=0.0)
RANGES = {"interleaved": ([(0, 2), (3, 5)], [(2, 3), (5, 6)]), "zbv": ([(0, 2), (5, 6)], [(2, 3), (3, 5)])}


def chunked_stage(rank: int, ranges: list[tuple[int, int]]) -> StagePlan:
    chunks = tuple(
        ChunkPlan(blocks=(a, b), forward_seconds=0.01 * (b - a), backward_seconds=0.02 * (b - a), hop_seconds=0.002)
        for a, b in ranges
    )
    made = stage(0, 1, (rank,), chunks=chunks)
    return StagePlan(**{name: getattr(made, name) for name in made.model_fields_set - {"blocks"}})


def chunked(schedule: str = "interleaved", micro_batches: int = 8) -> Plan:
    stages = [chunked_stage(rank, ranges) for rank, ranges in enumerate(RANGES[schedule])]
    return plan(
        replica(*stages, micro_batches=micro_batches),
        blocks=6,
        schedule=schedule,
        order_seconds=GRAPH if schedule == "zbv" else None,
    )


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


CHUNKS = ("replicas", 0, "stages", 1, "chunks")


@pytest.mark.parametrize(
    "schedule, changed, words",
    [
        ("interleaved", put(*CHUNKS, 0, "blocks", value=[2, 4]), "but the chunk before it, in stage 1, ends at 4"),
        ("interleaved", put(*CHUNKS, 1, "blocks", value=[6, 6]), "[6, 6) has no block; [a, b) needs"),
        ("interleaved", put(*CHUNKS, 1, "blocks", value="all"), "chunks[1].blocks"),
        (
            "interleaved",
            put("schedule", value="zbv"),
            "in the stages 0, 1, 0, 1; the schedule 'zbv' needs 0, 1, 1, 0",
        ),
        ("zbv", put("schedule", value="interleaved"), "in the stages 0, 1, 1, 0; the schedule 'interleaved' needs"),
        ("interleaved", put("schedule", value="1f1b"), "have chunks; with them the schedule is 'interleaved' or"),
        ("zbv", put("order_seconds", value=None), "schedule='zbv' needs order_seconds"),
        (
            "interleaved",
            put("order_seconds", value=GRAPH.model_dump()),
            "order_seconds belong to schedule='zbv' only",
        ),
        ("interleaved", put("blocks", value=7), "hold blocks 0 to 5, but the model has 7"),
        ("interleaved", put("schedule", value="gpipe"), "schedule"),
    ],
)
def test_errors_of_plans_with_chunks(tmp_path: Path, schedule: str, changed: Callable[[Any], None], words: str) -> None:
    save_plan(chunked(schedule), tmp_path / "plan.json")
    assert words in error_after(changed, tmp_path / "plan.json", load_plan)


def test_stages_need_equally_many_chunks() -> None:
    with pytest.raises(ValueError, match=r"have 2, 1 chunks; all stages of a replica have equally many"):
        replica(chunked_stage(0, [(0, 2), (3, 6)]), chunked_stage(1, [(2, 3)]))
    with pytest.raises(
        ValueError,
        match=r"schedule='interleaved', but the stages of replicas\[0\] have 0 chunks; each needs at least 2",
    ):
        plan(schedule="interleaved")


@pytest.mark.parametrize("schedule", RANGES)
def test_numbers_of_micro_batches_that_colossalai_runs(schedule: str) -> None:
    assert why_not_runnable(chunked(schedule)) is None
    problem = why_not_runnable(chunked(schedule, micro_batches=7))
    assert problem is not None and "7 micro-batches for 2 stages" in problem and "multiple" in problem


def test_stages_with_chunks_do_not_recompute() -> None:
    made = chunked()
    first, second = made.replicas[0].stages
    again = replica(first, second.model_copy(update={"recompute": True}))
    message = why_not_runnable(made.model_copy(update={"replicas": (again,)})) or ""
    assert "stage 1 of replica 0 runs its forward passes again" in message and "not with interleaved" in message
