"""Boxes of tensors, and of divided tensors, compared with sets of indices and with slices of the whole tensor."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from colossal_hetero.checkpoint.held_pieces import LocalPart, divided, flat_boxes, sliced, whole
from colossal_hetero.checkpoint.pieces import Box, cover


def indices(box: Box) -> set[tuple[int, ...]]:
    spans = [range(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True)]
    return set(itertools.product(*spans))


def boxes(dimensions: int) -> st.SearchStrategy[Box]:
    numbers = st.tuples(*[st.integers(0, 4)] * dimensions)
    sizes = st.tuples(*[st.integers(1, 4)] * dimensions)
    return st.builds(Box, numbers, sizes)


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


SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).view(shape)


def put(parts: Any, local: Tensor, target: Tensor) -> None:
    """Copy what a rank has into the whole tensor; every element at most once."""
    everything = Box((0,) * target.dim(), tuple(target.shape))
    of_local = Box((0,) * local.dim(), tuple(local.shape))
    for part in parts:
        place = target[everything.slices_of(part.whole)]
        assert (place == -1).all()
        place.copy_(local[of_local.slices_of(part.local)])


@given(st.data())
def test_the_shares_of_all_ranks_are_the_whole_tensor(data: st.DataObject) -> None:
    """As Colossal-AI divides: in sections, each into equal shares, the last section with padding behind it."""
    ranks = data.draw(st.integers(1, 4))
    sections = [ranks * each for each in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))]
    size = sum(sections)
    padding = data.draw(st.integers(0, size - 1)) if len(sections) == 1 else 0
    shape = list(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] = size - padding
    values = numbered(tuple(shape))
    pad = values.new_zeros([padding if axis == dim % len(shape) else length for axis, length in enumerate(shape)])
    found = torch.full_like(values, -1)
    for rank in range(ranks):
        chunks = torch.cat([values, pad], dim).split(sections, dim)
        local = torch.cat([chunk.chunk(ranks, dim)[rank] for chunk in chunks], dim)
        put(divided(shape, dim, sections, rank, ranks, size if padding else 0), local, found)
    assert torch.equal(found, values)


@given(SHAPES, st.data())
def test_a_flat_slice_is_cut_into_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel + 3))
    values = numbered(shape)
    everything = Box((0,) * len(shape), shape)
    boxes = flat_boxes(shape, start, stop)
    found = [values[everything.slices_of(box)].flatten() for box in boxes]
    assert torch.equal(torch.cat([*found, values.new_empty(0)]), values.flatten()[start:stop])
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
def test_zero_slices_of_a_fused_weight(ranks: int, shards: int, columns: int, width: int) -> None:
    """ZeRO pads the flat tensor at its end, so that all slices have one size."""
    sections = [ranks * width, ranks, ranks]
    values = numbered((columns, sum(sections)))
    found = torch.full_like(values, -1)
    for rank in range(ranks):
        parts = divided(values.shape, 1, sections, rank, ranks)
        local = torch.cat([chunk.chunk(ranks, 1)[rank] for chunk in values.split(sections, 1)], 1)
        size = -(-local.numel() // shards)
        for shard in range(shards):
            put(sliced(parts, local.shape, shard * size, (shard + 1) * size), local, found)
    assert torch.equal(found, values)


def test_a_scalar_is_one_box() -> None:
    assert whole(()) == (LocalPart(Box((), ()), Box((), ())),)
    assert sliced(whole(()), (), 0, 1) == whole(())


def test_impossible_divisions_are_refused() -> None:
    with pytest.raises(ValueError, match="sum 6, but dimension 0 has 7"):
        divided((7, 2), 0, [4, 2], 0, 2)
    with pytest.raises(ValueError, match="3 elements cannot be divided evenly over 2 ranks"):
        divided((3,), 0, [3], 0, 2)
