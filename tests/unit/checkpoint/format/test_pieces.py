"""Boxes of a tensor, compared with sets of indices."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.checkpoint.pieces import Box


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
