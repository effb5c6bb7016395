"""The newest state of which all elements are in some memory file, against all ways to lose files."""

from __future__ import annotations

from itertools import combinations

from colossal_hetero.checkpoint.pieces import Box
from colossal_hetero.elastic.memory_file import FoundState, KeptBox, StateName, newest_whole_state

A, B = "param.a", "param.b"
ROWS = [Box((0, 0), (2, 3)), Box((2, 0), (3, 3))]
"""Of a tensor of 5 by 3."""


def part(version: int, world: str, *boxes: tuple[str, Box]) -> FoundState:
    return FoundState(StateName(version, world), ("a", "b"), tuple(KeptBox(key, (5, 3), box) for key, box in boxes))


def test_a_state_counts_if_every_element_is_in_some_file() -> None:
    """By brute force: each subset of the files of five ranks, of which some hold the same."""
    whole = Box((0, 0), (5, 3))
    new = [
        part(7, "w1", (A, ROWS[0]), (B, whole)),
        part(7, "w1", (A, ROWS[1])),
        part(7, "w1", (A, Box((1, 0), (4, 3)))),  # overlaps with both
        part(7, "w1", (A, ROWS[0])),
        part(7, "w1", (B, ROWS[0]), (B, ROWS[1])),
    ]
    old = part(6, "w1", (A, whole), (B, whole))
    for count in range(6):
        for kept in combinations(new, count):
            elements = {
                (each.key, row)
                for file in kept
                for each in file.boxes
                for row in range(each.box.offsets[0], each.box.offsets[0] + each.box.sizes[0])
            }
            name = StateName(7 if len(elements) == 10 else 6, "w1")
            assert newest_whole_state([old, *kept]) == name
            assert (newest_whole_state(kept) is None) == (len(elements) < 10)


def test_worlds_are_not_mixed_and_the_later_one_counts() -> None:
    whole = Box((0, 0), (5, 3))
    halves = [part(7, "w1", (A, whole)), part(7, "w2", (B, whole))]
    assert newest_whole_state(halves) is None
    wholes = [part(7, "w1", (A, whole), (B, whole)), part(7, "w2", (A, whole), (B, whole))]
    assert newest_whole_state([*halves, *wholes]) == StateName(7, "w2")
    assert newest_whole_state([part(8, "w1", (A, whole), (B, whole)), *wholes]) == StateName(8, "w1")
    assert newest_whole_state([]) is None


def test_a_tensor_without_dimensions_and_a_buffer_count_too() -> None:
    step, whole = KeptBox("step.a", (), Box((), ())), Box((0, 0), (5, 3))
    name = StateName(1, "w")
    found = FoundState(name, ("a", "b"), (KeptBox(A, (5, 3), whole), KeptBox("buffer.b", (5, 3), whole), step))
    assert newest_whole_state([found]) == name
