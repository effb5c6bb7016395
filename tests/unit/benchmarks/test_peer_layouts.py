"""Plans as Sailor's repository writes them become layout lines, without a checkout of it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.planner.peers.layouts import has_one_degree, layout_line
from colossal_hetero.planner.cost.layout_line import read_layout

LAYERS = 10
"""Of a model of eight blocks, with an embedding and a head."""


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


def test_equal_pipelines() -> None:
    found = line(pipeline([[member("A")] * 2, [member("B")] * 2], (4,)), mbs=2)
    assert found == "dp 2 × pp [A 0-2 | B 3-7] · micro-batch 2 × 4"


def test_embedding_and_head_go_with_blocks() -> None:
    found = line(pipeline([[member("A")], [member("A")]], (5,)))
    assert found == "dp 1 × pp [A 0-3 | A 4-7] · micro-batch 1 × 16"
    with pytest.raises(ValueError, match="a stage has no block"):
        line(pipeline([[member("A")], [member("A")]], (1,)))
    with pytest.raises(ValueError, match="a stage has no block"):
        line(pipeline([[member("A")], [member("A")]], (9,)))


def test_members_of_a_stage_may_differ_in_kind_and_degree() -> None:
    stages = [[member("A"), member("B", 4)], [member("A"), member("A")]]
    found = line(pipeline(stages, (5,)))
    pipelines = "1 × pp [A (tp 1) 0-3 | A (tp 1) 4-7] + 1 × pp [B (tp 4) 0-3 | A (tp 1) 4-7]"
    assert found == f"dp 2 = {pipelines} · micro-batch 1 × 8"
    assert not has_one_degree(found)


@pytest.mark.parametrize(
    ("line", "one"),
    [
        ("dp 2 × pp [A 0-3 | B 4-7]", True),
        ("dp 2 × pp [A (tp 2) 0-3 | B (tp 2) 4-7]", True),
        ("tp 2 · dp 2 × pp [A 0-3 | B (tp 2) 4-7]", True),
        ("dp 2 × pp [A 0-3 | B (tp 2) 4-7]", False),
        ("dp 2 = pp [A 0-7] + pp [B (tp 2, recompute) 0-7]", False),
        ("tp 4 · dp 2 × pp [A 0-3 | B (tp 2) 4-7]", False),
    ],
)
def test_degrees_of_a_line(line: str, one: bool) -> None:
    assert has_one_degree(line) is one


def test_micro_batches_that_cannot_be_divided_equally() -> None:
    found = line(pipeline([[member("A")] * 3], ()), mbs=1)
    assert found == "dp 3 = 1 × pp [A 0-7] × 6 + 2 × pp [A 0-7] × 5 · micro-batch 1"


def test_stages_have_equally_many_members() -> None:
    with pytest.raises(ValueError, match="different numbers of data-parallel members"):
        line(pipeline([[member("A", 2)] * 2, [member("B")] * 4], (5,)), mbs=4)


def test_several_pipelines() -> None:
    found = line(pipeline([[member("A")]], ()), pipeline([[member("B")], [member("B")]], (5,)))
    assert found == "dp 2 = 1 × pp [A 0-7] + 1 × pp [B 0-3 | B 4-7] · micro-batch 1 × 8"


def test_groups_that_a_line_cannot_say() -> None:
    both = [[["A", 4, "zone"], ["B", 4, "zone"]], 2]
    with pytest.raises(ValueError, match="several kinds of GPU: A, B"):
        line(pipeline([[both]], ()))
    twice = [[["A", 4, "zone"], ["A", 4, "zone"]], 2]
    assert line(pipeline([[twice]], ())) == "dp 1 × pp [A (tp 2) 0-7] · micro-batch 1 × 16"
    with pytest.raises(ValueError, match="beyond a node"):
        line(pipeline([[member("A", 8)]], ()))


def test_plans_that_do_not_fit_the_model_or_the_batch() -> None:
    with pytest.raises(ValueError, match="do not hold the layers 0 to 11"):
        layout_line({"mbs": 1, "pipelines": [pipeline([[member("A")]], ())]}, 12, 1, 1, 16)
    with pytest.raises(ValueError, match="16 samples are no whole number of micro-batches of 3"):
        line(pipeline([[member("A")]], ()), mbs=3)
    with pytest.raises(ValueError, match="3 pipelines for 2 micro-batches"):
        line(pipeline([[member("A")] * 3], ()), mbs=8)
    with pytest.raises(ValueError, match=r"micro-batches have 1\.5 samples"):
        line(pipeline([[member("A")]], ()), mbs=1.5)
