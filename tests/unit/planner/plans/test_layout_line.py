"""Layouts on one line: written and read back, errors that point to their column, shortened lines."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.common.text import MarkedError
from colossal_hetero.planner.cost.layout_line import (
    PipelineLayout,
    PlanLayout,
    StageLayout,
    read_layout,
    write_layout,
)

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
            StageLayout(
                draw(st.sampled_from(DEVICES)),
                ((a, b),),
                draw(st.booleans()),
            )
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


@pytest.mark.parametrize(
    ("line", "at", "words"),
    [
        ("dp 2 × pp [A 0-3 | B 5-7]", "B 5", "block 4 is in no stage; this one must start at 4"),
        ("dp 2 × pp [A 0-3 | B 6-7]", "B 6", "blocks 4 to 5 are in no stage"),
        ("dp 2 × pp [A 0-3 | B 2-7]", "B 2", "blocks 2 to 3 are in two stages; this one must start at 4"),
        ("dp 2 × pp [A 1-3 | B 4-7]", "A 1", "block 0 is in no stage"),
        ("pp [A 0-3] + pp [B 0-1 | C 2-2]", "C 2", "block 3 is in the other pipelines but not in this one"),
        ("dp 3 = 2 × pp [A 0-3]", "dp 3", "dp 3, but there are 2 pipelines"),
        ("dp 2 × pp [A 0-3] + pp [B 0-3]", " + pp [B", "several different pipelines are written dp N = "),
        ("dp 2 × pp [2 × A 0-4]", "2 × A", "5 blocks cannot be divided equally over 2 stages"),
        ("dp 2 × pp [A 3-0]", "3-0", "write the first block before the last one"),
        ("dp 2 × pp [A 0-3", "[A", "the bracket [ is not closed"),
        ("dp 2 × pp [A 0-3 | ]", "]", "expected a kind of device and its blocks"),
        ("dp 2 × pp [A]", "A]", "expected a kind of device and its blocks"),
        ("dp 2 × pp [A 0-3 | V100-16 tp 4 4-9]", "tp 4", "write tp N once, before the pipelines"),
        ("pp [2 × A (tp 4, recompute) 0-3]", "tp 4", "write tp N once, before the pipelines"),
        ("pp [A tp4 (recompute) 0-3]", "tp4", "write tp N once, before the pipelines"),
        ("pp [A100-40 recompute recompute 0-3]", "recompute", "recompute is given twice"),
        ("pp [A(recompute) 0-3]", "recompute", "recompute stands alone behind the device"),
        ("dp 2 × [A 0-3] · colour 3", "colour", "expected tp N, dp N × pp"),
        ("dp 0 × pp [A 0-3]", "0 ×", "numbers start at 1"),
        ("tp 1 · dp 2 × pp [A 0-3] · tp 2", "tp 2", "tp: given twice"),
        ("dp 2 × pp [A 0-3] · [B 0-3]", "[B", "the pipelines: given twice"),
        ("dp 2 × pp [A 0-3 | … | B 8-9]", "…", "parts that were left out"),
        ("dp 9 = pp [A 0-3] × 2 + …", "…", "parts that were left out"),
        ("dp 2 × pp [A 0-3 + 6-7 | B 4-5]", "A 0", "needs a schedule"),
        ("dp 1 × pp [A 0-3 + 6-7 | B 4-5] · zbv", "B 4", "all stages have equally many chunks"),
        ("dp 1 × pp [A 0-3] × 8 · micro-batch 1 × 4", "A 0", "has 8 micro-batches, but micro-batch 1 × 4 says 4"),
        ("tp 2", "", "there are no pipelines"),
        ("", "", "there are no pipelines"),
    ],
)
def test_errors_point_to_their_column(line: str, at: str, words: str) -> None:
    with pytest.raises(MarkedError, match=re.escape(words)) as caught:
        read_layout(line)
    place = line.index(at) if at else len(line)
    assert caught.value.place == place, caught.value.pointer
    assert str(caught.value).startswith(f"column {place + 1}: ")
    shown, mark = caught.value.pointer.split("\n")
    assert line[place:] == shown[mark.index("^") :]


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
