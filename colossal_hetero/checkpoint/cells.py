"""Check sums of the cells of a tensor, so that a part can be read and checked without the rest.

A stored tensor is divided into a grid of small cells with boundaries at those of tensor parallelism. Each has a 32-bit
multilinear hash: its words, each multiplied by an odd number of its own, summed modulo 2^32 (Carter and Wegman,
Universal classes of hash functions, 1979). Every change of a single word changes the hash; of other changes, one in
2^32 does not. numpy computes it at several GB/s, and lets other threads run meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .pieces import Box

__all__ = ["CHECK_BYTES", "Words", "aligned", "cell_sizes", "check_sums", "grid_box", "grid_shape", "runs", "words"]

Words = NDArray[np.unsignedinteger]
"""The elements of a tensor as whole numbers of at most 32 bits; larger elements are several numbers."""
CHECK_BYTES = 4
CELL_BYTES = 256
"""Smallest size of a cell in tensors of at least :data:`SMALL_BYTES`: check sums add at most 1.6 %."""
SMALL_BYTES = 64 * 1024
"""Tensors with fewer bytes have smaller cells: here check sums may add more."""
COLUMNS = 144
"""Cells in the last dimension: 1/2, 1/3, 1/4, 1/6, 1/8, 1/9, 1/12 and 1/16 of it are whole cells. One of three ranks
has ninths in a row of a fused weight of queries, keys and values."""
ELEMENTS = 192
"""Cells of a tensor with one dimension, unless it is large."""
FACTOR, OFFSET, NEVER_ZERO = 0x9E3779B1, 0x85EBCA6B, 0x5BD1E995
"""Constants of the hash. The last makes the sum of zeros differ from zero: a file system may lose data as zeros."""
BUFFER_BYTES = 256 * 1024
"""Bytes summed at a time: they fit in a processor's cache."""


def cell_sizes(sizes: tuple[int, ...], element_bytes: int) -> tuple[int, ...]:
    """Elements of a cell, by dimension, for a tensor of these sizes."""
    if not sizes:
        return ()
    total = math.prod(sizes) * element_bytes
    if len(sizes) == 1:
        return (max(1, min(sizes[0] // ELEMENTS, math.ceil(CELL_BYTES / element_bytes))),)
    last = sizes[-1]
    common = math.gcd(last, COLUMNS)
    columns = last // common if common >= 8 else math.ceil(last / COLUMNS)
    cells = [max(1, columns)]
    for size in reversed(sizes[:-1]):
        needed = 1 if total < SMALL_BYTES else math.ceil(CELL_BYTES / (math.prod(cells) * element_bytes))
        cells.insert(0, max(1, min(size, needed)))
    return tuple(cells)


def grid_shape(sizes: tuple[int, ...], cells: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.ceil(size / cell) for size, cell in zip(sizes, cells, strict=True))


def aligned(box: Box, sizes: tuple[int, ...], cells: tuple[int, ...]) -> Box:
    """The smallest box of whole cells that contains ``box``, in a tensor with these sizes."""
    starts = [offset // cell * cell for offset, cell in zip(box.offsets, cells, strict=True)]
    stops = [
        min(size, math.ceil((offset + length) / cell) * cell)
        for offset, length, size, cell in zip(box.offsets, box.sizes, sizes, cells, strict=True)
    ]
    return Box(tuple(starts), tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def grid_box(box: Box, cells: tuple[int, ...]) -> Box:
    """The cells of an aligned box, in the grid of cells."""
    return Box(
        tuple(offset // cell for offset, cell in zip(box.offsets, cells, strict=True)),
        tuple(math.ceil(size / cell) for size, cell in zip(box.sizes, cells, strict=True)),
    )


def runs(sizes: tuple[int, ...], box: Box, element_bytes: int) -> tuple[NDArray[np.int64], int]:
    """Ascending offsets, and the length, in bytes, of a box's contiguous runs in a tensor that is stored row by row."""
    inner, split = element_bytes, len(sizes)
    while split > 0:
        split -= 1
        length = inner * box.sizes[split]
        if box.sizes[split] != sizes[split]:
            break
        inner = length
    if split == 0 and (not sizes or box.sizes[0] == sizes[0]):
        return np.zeros(1, np.int64), inner
    strides = [element_bytes * math.prod(sizes[dimension + 1 :]) for dimension in range(len(sizes))]
    offsets = np.array([box.offsets[split] * strides[split]], np.int64)
    for dimension in reversed(range(split)):
        starts = (np.arange(box.sizes[dimension], dtype=np.int64) + box.offsets[dimension]) * strides[dimension]
        offsets = (starts[:, None] + offsets).reshape(-1)
    return offsets, length


def words(data: NDArray[np.uint8], sizes: tuple[int, ...], element_bytes: int) -> Words:
    """The bytes of a tensor as words of at most 32 bits: ``[*sizes[:-1], sizes[-1] * words of an element]``."""
    types = {1: np.uint8, 2: np.uint16}
    shape = sizes or (1,)
    return data.view(types.get(element_bytes, np.uint32)).reshape(*shape[:-1], shape[-1] * max(1, element_bytes // 4))


def check_sums(tensor: Words, cells: tuple[int, ...], element_bytes: int) -> NDArray[np.uint32]:
    """Check sums of all cells of a tensor or of an aligned box of it: ``[cells by dimension]``, little-endian."""
    steps = [*cells] if cells else [1]
    steps[-1] *= max(1, element_bytes // 4)
    row_bytes = tensor[:1].size * 4
    rows = max(1, BUFFER_BYTES // max(row_bytes, 1)) * steps[0]
    parts = [_summed(tensor[start : start + rows], steps) for start in range(0, tensor.shape[0], rows)]
    summed = np.concatenate(parts) if len(parts) != 1 else parts[0]
    return (summed ^ np.uint32(NEVER_ZERO)).astype("<u4", copy=False)


def _summed(tensor: Words, steps: Sequence[int]) -> NDArray[np.uint32]:
    summed: NDArray[np.uint32] = tensor  # type: ignore[assignment]
    for axis in reversed(range(tensor.ndim)):
        size, step = tensor.shape[axis], steps[axis]
        factors = (np.arange(size, dtype=np.uint32) % np.uint32(step)) * np.uint32(FACTOR) + np.uint32(OFFSET)
        weighted = summed * (factors | np.uint32(1)).reshape(-1, *[1] * (tensor.ndim - 1 - axis))
        summed = np.add.reduceat(weighted, np.arange(0, size, step), axis=axis, dtype=np.uint32)
    return summed
