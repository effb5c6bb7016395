"""Boxes of a tensor, compared with sets of indices."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.checkpoint.pieces import Box, cover


def indices(box: Box) -> set[tuple[int, ...]]:
    spans = [range(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True)]
    return set(itertools.product(*spans))


def boxes(dimensions: int) -> st.SearchStrategy[Box]:
    numbers = st.tuples(*[st.integers(0, 4)] * dimensions)
    sizes = st.tuples(*[st.integers(1, 4)] * dimensions)
    return st.builds(Box, numbers, sizes)


@given(st.integers(0, 3).flatmap(lambda dimensions: st.tuples(boxes(dimensions), boxes(dimensions))))
def test_the_intersection_has_the_elements_of_both(pair: tuple[Box, Box]) -> None:
    first, second = pair
    common = first.intersection(second)
    both = indices(first) & indices(second)
    assert (set() if common is None else indices(common)) == both
    if common is None:
        return
    assert common.numel == len(both)
    whole = torch.arange(8 ** len(first.offsets)).view([8] * len(first.offsets))
    origin = Box((0,) * len(first.offsets), (8,) * len(first.offsets))
    held = whole[origin.slices_of(first)]
    assert torch.equal(held[first.slices_of(common)], whole[origin.slices_of(common)])


@given(st.integers(1, 3).flatmap(lambda rank: st.tuples(boxes(rank), st.lists(boxes(rank), max_size=4))))
def test_a_cover_has_each_element_once_and_the_rest_is_left(case: tuple[Box, list[Box]]) -> None:
    needed, held = case
    parts, left = cover(needed, held)
    found = [index for _, part in parts for index in indices(part)]
    found += [index for part in left for index in indices(part)]
    assert sorted(found) == sorted(indices(needed))
    for number, part in parts:
        assert indices(part) <= indices(held[number])
    for part in left:
        assert not any(indices(part) & indices(box) for box in held)


@given(st.integers(0, 3).flatmap(boxes), st.integers(1, 20))
def test_pieces_are_the_elements_in_order(box: Box, numel: int) -> None:
    pieces = box.pieces(numel)
    assert [index for piece in pieces for index in sorted(indices(piece))] == sorted(indices(box))
    row = box.numel // next((size for size in box.sizes if size > 1), 1)
    assert all(piece.numel <= max(numel, row) for piece in pieces)
