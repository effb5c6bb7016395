"""The first plan of a peer that can be used is taken, and the file says why others were not."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.planner.peers import run_planners
from benchmarks.planner.peers.compare import load_peer_plans
from benchmarks.planner.peers.run_planners import Found, choose, power_of_two, written
from benchmarks.planner.published_clusters import Case

CASE = Case("1 × 4 A", cast(Any, None), cast(Any, SimpleNamespace(name="OPT", layers=6, before=1, after=1)))


def plan(degree: int, seconds: float) -> dict[str, Any]:
    stages = [[[[["A", 4, "zone"]], degree]]]
    pipelines = [{"layers_per_stage": [list(range(6))], "tmp_stages": stages}]
    return {"mbs": 1, "pipelines": pipelines, "own_seconds": seconds}


def test_the_first_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluated(*arguments: Any, global_batch: int) -> Any:
        degree = arguments[2].tensor_parallel
        return SimpleNamespace(fits=degree == 4)

    monkeypatch.setattr(run_planners, "evaluate_layout", evaluated)
    answer = {"returned": 9, "too_large": 5, "plans": [plan(8, 1.0), plan(2, 1.5), plan(4, 2.0), plan(1, 3.0)]}
    found = choose(answer, CASE, 8)
    assert (found.layout, found.own_seconds) == ("dp 1 × pp [A (tp 4) 0-3] · micro-batch 1 × 8", 2.0)
    assert found.note == (
        "9 plans returned; left out: 5 × too large by Sailor's count; 1 × a tensor-parallel group of 8 GPUs reaches "
        "beyond a node; 1 × too large by our count"
    )
    two = {
        "layers_per_stage": [[0, 1, 2], [3, 4, 5]],
        "tmp_stages": [[[[["A", 4, "zone"]], 1]], [[[["A", 4, "zone"]], 2]]],
    }
    found = choose({**answer, "plans": [{"mbs": 1, "pipelines": [two]}]}, CASE, 8)
    assert found.layout == "dp 1 × pp [A (tp 1) 0-1 | A (tp 2) 2-3] · micro-batch 1 × 8"
    assert found.note.startswith("9 plans returned; not priced: several tensor-parallel degrees")
    found = choose({**answer, "plans": [plan(2, 1.0)]}, CASE, 8)
    assert found.layout is None and found.note.startswith("none of 9 plans can be used; left out: 5 ×")


def test_the_file_is_read_back(tmp_path: Path) -> None:
    results = [(CASE, Found("dp 1 × pp [A 0-3]", '3 plans "returned"', 2.0, 1.5)), (CASE, Found(None, "crashed"))]
    text = written("Metis", results, "cf2c8e3c", Namespace(seconds=300.0, global_batch=256))
    (tmp_path / "metis.toml").write_text(text, encoding="utf-8")
    (each,) = load_peer_plans(tmp_path)
    assert (each.cluster, each.model, each.layout) == ("1 × 4 A", "OPT", "dp 1 × pp [A 0-3]")
    assert "[[missing]]" in text and 'note = "crashed"' in text and "own_prediction_seconds = 2" in text


def test_nodes_are_left_out_for_a_power_of_two() -> None:
    assert power_of_two([("A", 2, 4), ("B", 2, 4)]) == [(("A", 2, 4), ("B", 2, 4))]
    assert power_of_two([("A", 1, 4), ("B", 4, 4)]) == [(("B", 4, 4),), (("A", 1, 4), ("B", 3, 4))]
