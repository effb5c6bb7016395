"""Where the parts of a divided tensor belong in the whole tensor, as boxes. Pure.

A rank's tensor is called *local*. A :class:`LocalPart` says that a box of the local tensor is a box of the whole one.
What no part covers is padding: it is not saved, and it is zero when the tensor is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..format.box import Box

__all__ = ["LocalPart", "divided", "flat_boxes", "sliced", "whole"]


class LocalPart(NamedTuple):
    """Elements of a local tensor. Both boxes have the same sizes."""

    local: Box
    """Where they are in the local tensor."""
    whole: Box
    """Where they belong in the whole tensor."""


def whole(shape: Sequence[int]) -> tuple[LocalPart, ...]:
    """The parts of a tensor of this shape that is not divided."""
    box = Box((0,) * len(shape), tuple(shape))
    return (LocalPart(box, box),) if box.numel else ()


def divided(
    shape: Sequence[int], dim: int, sections: Sequence[int], rank: int, ranks: int, padded: int = 0
) -> tuple[LocalPart, ...]:
    """The parts that a rank has of a tensor that is divided along one dimension.

    The dimension consists of sections, such as those of queries, keys and values in a fused weight. Each is divided
    evenly, and a rank's parts of all sections follow each other in its local tensor.

    Args:
        shape: of the whole tensor, without padding.
        dim: the dimension; negative numbers count from the last one.
        sections: sizes of the sections. Their sum is the size of the dimension, or of the padded one.
        rank: number of the rank in its group.
        ranks: number of ranks in the group.
        padded: size of the dimension with padding at its end, or 0 if there is none.

    Raises:
        ValueError: the sections have another sum than the dimension, or cannot be divided evenly.
    """
    dim %= len(shape)
    size = max(shape[dim], padded)
    if sum(sections) != size:
        raise ValueError(f"sections {list(sections)} have the sum {sum(sections)}, but dimension {dim} has {size}")
    uneven = [section for section in sections if section % ranks]
    if uneven:
        raise ValueError(f"a section of {uneven[0]} elements cannot be divided evenly over {ranks} ranks")
    parts: list[LocalPart] = []
    start = local = 0
    for section in sections:
        share = section // ranks
        first = start + rank * share
        length = min(share, shape[dim] - first)
        if length > 0:
            sizes = (*shape[:dim], length, *shape[dim + 1 :])
            part = LocalPart(Box(_at(dim, local, len(shape)), sizes), Box(_at(dim, first, len(shape)), sizes))
            if part.local.numel:
                parts.append(part)
        start += section
        local += share
    return tuple(parts)


def _at(dim: int, offset: int, dims: int) -> tuple[int, ...]:
    return tuple(offset if each == dim else 0 for each in range(dims))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Boxes with the elements ``start`` to ``stop`` (exclusive) of the flattened tensor, in this order.

    Each box is contiguous in memory. A tensor of n dimensions gives at most 2 n - 1 of them.
    """
    start, stop = max(start, 0), min(stop, math.prod(shape))
    if start >= stop:
        return ()
    if len(shape) <= 1:
        return (Box((start,), (stop - start,)),) if shape else (Box((), ()),)
    row = math.prod(shape[1:])
    boxes: list[Box] = []
    while start < stop:
        index = start // row
        if start % row == 0 and stop - start >= row:
            count = (stop - start) // row
            boxes.append(Box((index, *(0 for _ in shape[1:])), (count, *shape[1:])))
            start += count * row
        else:
            end = min(stop, (index + 1) * row)
            inner = flat_boxes(shape[1:], start - index * row, end - index * row)
            boxes += [Box((index, *box.offsets), (1, *box.sizes)) for box in inner]
            start = end
    return tuple(boxes)


def sliced(parts: Iterable[LocalPart], shape: Sequence[int], start: int, stop: int) -> tuple[LocalPart, ...]:
    """Those of ``parts`` that are in the slice ``start`` to ``stop`` of the flattened local tensor, cut where needed.

    Args:
        parts: of the local tensor.
        shape: of the local tensor.
        start: first element of the slice.
        stop: end of the slice, exclusive; it may be behind the end of the tensor, as ZeRO's padding is.
    """
    found: list[LocalPart] = []
    parts = tuple(parts)
    for box in flat_boxes(shape, start, stop):
        for part in parts:
            common = part.local.intersection(box)
            if common is not None:
                found.append(LocalPart(common, moved(common, part)))
    return tuple(found)


def moved(box: Box, part: LocalPart) -> Box:
    """Where a box of the local tensor, which lies in ``part``, belongs in the whole tensor."""
    offsets = zip(box.offsets, part.local.offsets, part.whole.offsets, strict=True)
    return Box(tuple(offset - local + there for offset, local, there in offsets), box.sizes)
