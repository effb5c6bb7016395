"""Plans of peers: their inputs from our numbers, layout lines from what they write, and which of them is taken."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks.planner.peers.compare import PricedPlan, count_wins
from benchmarks.planner.peers.layouts import has_one_degree, layout_line
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
