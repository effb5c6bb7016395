"""Check sums of cells: every part of a tensor can be checked by itself, and little more is read than is needed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.checkpoint.cells import (
    CHECK_BYTES,
    aligned,
    cell_sizes,
    check_sums,
    grid_box,
    grid_shape,
    runs,
    words,
)
from colossal_hetero.checkpoint.pieces import Box

Case = tuple[tuple[int, ...], int, Box, int]


def read(data: np.ndarray, sizes: tuple[int, ...], box: Box, element_bytes: int) -> np.ndarray:
    offsets, length = runs(sizes, box, element_bytes)
    assert list(offsets) == sorted(set(offsets.tolist()))
    return np.concatenate([data[offset : offset + length] for offset in offsets])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A tensor, the size of its elements, a box in it, and the number of one of its bytes."""
    sizes = tuple(draw(st.lists(st.integers(1, 200), max_size=2))) + tuple(
        draw(st.lists(st.integers(1, 5), max_size=2))
    )
    offsets = tuple(draw(st.integers(0, size - 1)) for size in sizes)
    lengths = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(sizes, offsets, strict=True))
    element_bytes = draw(st.sampled_from([1, 2, 4, 8, 16]))
    return sizes, element_bytes, Box(offsets, lengths), draw(st.integers(0, math.prod(sizes) * element_bytes - 1))


@given(cases())
def test_a_part_has_the_sums_of_its_cells_and_a_changed_byte_is_noticed(case: Case) -> None:
    sizes, element_bytes, box, changed = case
    data = np.random.default_rng(0).integers(0, 256, math.prod(sizes) * element_bytes, np.uint8)
    cells = cell_sizes(sizes, element_bytes)
    sums = check_sums(words(data, sizes, element_bytes), cells, element_bytes)
    grid = grid_shape(sizes, cells)
    assert sums.size == math.prod(grid)
    part = aligned(box, sizes, cells)
    assert part.intersection(box) == box

    def check(content: np.ndarray) -> bool:
        own = read(content, sizes, part, element_bytes)
        stored = read(sums.reshape(-1).view(np.uint8), grid, grid_box(part, cells), CHECK_BYTES)
        computed = check_sums(words(own, part.sizes, element_bytes), cells, element_bytes)
        return np.array_equal(computed.reshape(-1), stored.view("<u4"))

    assert check(data)
    index = np.unravel_index(changed // element_bytes, sizes) if sizes else ()
    in_part = all(start <= at < start + size for at, start, size in zip(index, part.offsets, part.sizes, strict=True))
    data[changed] ^= 1 << changed % 8
    assert check(data) is not in_part


def test_zeros_do_not_pass_where_data_and_sums_were_lost() -> None:
    data = np.zeros(4096, np.uint8)
    assert (check_sums(words(data, (32, 32), 4), cell_sizes((32, 32), 4), 4) != 0).all()


@pytest.mark.parametrize("sizes", [(768, 768), (768, 3072), (4096, 1376), (11008, 4096), (50257, 768)])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_little_more_is_read_than_is_needed(sizes: tuple[int, int], element_bytes: int, parts: int) -> None:
    cells = cell_sizes(sizes, element_bytes)
    grid = grid_shape(sizes, cells)
    for rows, columns in itertools.product([True, False], repeat=2):
        # Tensor parallelism divides columns evenly; ZeRO cuts rows anywhere.
        if columns and sizes[1] % parts:
            continue
        cut = (sizes[0] // parts if rows else sizes[0], sizes[1] // parts if columns else sizes[1])
        needed = Box((sizes[0] - cut[0], sizes[1] - cut[1]), cut)
        part = aligned(needed, sizes, cells)
        checks = grid_box(part, cells).numel * CHECK_BYTES
        assert part.numel * element_bytes + checks <= 1.05 * needed.numel * element_bytes
        assert math.prod(grid) * CHECK_BYTES <= 0.02 * math.prod(sizes) * element_bytes


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_parts_of_experts_are_cells_in_every_dimension(dimension: int) -> None:
    sizes = (8, 1376, 1024)
    cut = tuple(size // 4 if index == dimension else size for index, size in enumerate(sizes))
    needed = Box(tuple(size - part for size, part in zip(sizes, cut, strict=True)), cut)
    assert aligned(needed, sizes, cell_sizes(sizes, 2)).numel <= 1.02 * needed.numel
