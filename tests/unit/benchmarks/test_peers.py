"""Plans of peers: their inputs from our numbers, layout lines from what they write, and which of them is taken."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.planner.peers import run_planners
from benchmarks.planner.peers.compare import PricedPlan, count_wins, load_peer_plans
from benchmarks.planner.peers.layouts import has_one_degree, layout_line
from benchmarks.planner.peers.run_planners import Found, choose, written
from benchmarks.planner.published_clusters import CLUSTERS, Case, cluster_name
from colossal_hetero.planner.cost.layout_line import read_layout
from tests.support.plans import plan


def priced(*seconds: float | None, fits: bool = True) -> PricedPlan:
    return PricedPlan(cast(Any, plan()), seconds, fits, "")


def test_wins_are_counted_where_a_plan_has_a_price_and_a_rival() -> None:
    cases: list[dict[str, PricedPlan | str]] = [
        {"ours": priced(1.0, None), "peer": priced(1.005, 2.0), "other": priced(0.5, 1.0)},
        {"ours": priced(2.0, 3.0), "peer": priced(1.6, 3.2), "other": priced(0.5, 1.0)},
        {"ours": priced(2.0, 3.0), "peer": priced(1.0, 1.0, fits=False)},
        {"ours": "no plan", "peer": priced(1.0, 1.0)},
    ]
    found = count_wins(cases, "ours", 0, {"peer"}.__contains__)
    assert (found.rows, found.wins, found.behind) == (2, 1, 1.25)
    found = count_wins(cases, "ours", 1, {"peer"}.__contains__)
    assert (found.rows, found.wins, found.behind) == (1, 1, 1.0)


LAYERS = 10  # of a model of eight blocks, with an embedding and a head


def member(kind: str, degree: int = 1, size: int = 4) -> list[Any]:
    return [[[kind, size, "zone"]], degree]


def pipeline(stages: list[list[list[Any]]], ends: tuple[int, ...]) -> dict[str, Any]:
    starts = (0, *ends)
    layers = [list(range(a, b)) for a, b in zip(starts, (*ends, LAYERS), strict=True)]
    return {"layers_per_stage": layers, "tmp_stages": stages}


def line(*pipelines: dict[str, Any], mbs: float = 1, batch: int = 16) -> str:
    found = layout_line({"mbs": mbs, "pipelines": pipelines}, LAYERS, 1, 1, batch)
    if has_one_degree(found):
        read_layout(found)
    return found


A, B, PAIR = [member("A")], [member("B")], [["A", 4, "zone"], ["A", 4, "zone"]]


def test_plans_of_sailor_are_layout_lines() -> None:
    for pipelines, mbs, expected in (
        ([pipeline([A * 2, B * 2], (4,))], 2, "dp 2 × pp [A 0-2 | B 3-7] · micro-batch 2 × 4"),
        ([pipeline([A, A], (5,))], 1, "dp 1 × pp [A 0-3 | A 4-7] · micro-batch 1 × 16"),  # the ends go with blocks
        (
            [pipeline([[member("A"), member("B", 4)], A * 2], (5,))],
            1,
            "dp 2 = 1 × pp [A (tp 1) 0-3 | A (tp 1) 4-7] + 1 × pp [B (tp 4) 0-3 | A (tp 1) 4-7] · micro-batch 1 × 8",
        ),
        ([pipeline([A * 3], ())], 1, "dp 3 = 1 × pp [A 0-7] × 6 + 2 × pp [A 0-7] × 5 · micro-batch 1"),
        (
            [pipeline([A], ()), pipeline([B, B], (5,))],
            1,
            "dp 2 = 1 × pp [A 0-7] + 1 × pp [B 0-3 | B 4-7] · micro-batch 1 × 8",
        ),
        ([pipeline([[[PAIR, 2]]], ())], 1, "tp 2 · dp 1 × pp [A 0-7] · micro-batch 1 × 16"),
    ):
        assert line(*pipelines, mbs=mbs) == expected
    for stages, ends, mbs, message in (
        ([A, A], (1,), 1, "a stage has no block"),
        ([A, A], (9,), 1, "a stage has no block"),
        ([[member("A", 2)] * 2, B * 4], (5,), 4, "different numbers of data-parallel members"),
        ([[[[["A", 4, "zone"], ["B", 4, "zone"]], 2]]], (), 1, "several kinds of GPU: A, B"),
        ([[member("A", 8)]], (), 1, "beyond a node"),
        ([A], (), 3, "16 samples are no whole number of micro-batches of 3"),
        ([A * 3], (), 8, "3 pipelines for 2 micro-batches"),
        ([A], (), 1.5, r"micro-batches have 1\.5 samples"),
    ):
        with pytest.raises(ValueError, match=message):
            line(pipeline(stages, ends), mbs=mbs)
    with pytest.raises(ValueError, match="do not hold the layers 0 to 11"):
        layout_line({"mbs": 1, "pipelines": [pipeline([A], ())]}, 12, 1, 1, 16)


PLANS = """
peer = "Metis"
repository = "SamsungLabs/Metis"
commit = "4b24046fbef31ca6fec6ccfd772d709f16257320"

[[plans]]
cluster = "2 × 4 A100-40 + 2 × 4 V100-16"
model = "OPT-350"
layout = "dp 8 x pp [V100-16 0-9 | A100-40 10-23], micro-batch 1 x 32"
"""


def test_plans_of_peers(tmp_path: Path) -> None:
    file = tmp_path / "metis.toml"
    file.write_text(PLANS, encoding="utf-8")
    (each,) = load_peer_plans(tmp_path)
    assert each.peer == "Metis (SamsungLabs/Metis@4b24046)" and each.cluster == cluster_name(CLUSTERS[0])
    for word, other, message in (
        ("commit", "version", r"metis\.toml lacks commit"),
        ("layout", "plan", "needs cluster, model and layout"),
    ):
        file.write_text(PLANS.replace(word, other), encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            load_peer_plans(tmp_path)


CASE = Case("1 × 4 A", cast(Any, None), cast(Any, SimpleNamespace(name="OPT", layers=6, before=1, after=1)))


def peer_plan(degree: int, seconds: float) -> dict[str, Any]:
    stages = [[[[["A", 4, "zone"]], degree]]]
    pipelines = [{"layers_per_stage": [list(range(6))], "tmp_stages": stages}]
    return {"mbs": 1, "pipelines": pipelines, "own_seconds": seconds}


def test_the_first_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        run_planners,
        "evaluate_layout",
        lambda *given, global_batch: SimpleNamespace(fits=given[2].tensor_parallel == 4),
    )
    plans = [peer_plan(8, 1.0), peer_plan(2, 1.5), peer_plan(4, 2.0), peer_plan(1, 3.0)]
    answer = {"returned": 9, "too_large": 5, "plans": plans}
    found = choose(answer, CASE, 8)
    assert (found.layout, found.own_seconds) == ("tp 4 · dp 1 × pp [A 0-3] · micro-batch 1 × 8", 2.0)
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
    found = choose({**answer, "plans": [peer_plan(2, 1.0)]}, CASE, 8)
    assert found.layout is None and found.note.startswith("none of 9 plans can be used; left out: 5 ×")


def test_the_file_is_read_back(tmp_path: Path) -> None:
    results = [(CASE, Found("dp 1 × pp [A 0-3]", '3 plans "returned"', 2.0, 1.5)), (CASE, Found(None, "crashed"))]
    text = written("Metis", results, "cf2c8e3c", Namespace(seconds=300.0, global_batch=256))
    (tmp_path / "metis.toml").write_text(text, encoding="utf-8")
    (each,) = load_peer_plans(tmp_path)
    assert (each.cluster, each.model, each.layout) == ("1 × 4 A", "OPT", "dp 1 × pp [A 0-3]")
    assert "[[missing]]" in text and 'note = "crashed"' in text and "own_prediction_seconds = 2" in text
