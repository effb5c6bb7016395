"""Rectangular parts of tensors, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Box", "cover", "whole"]


@dataclass(frozen=True, order=True)
class Box:
    """A rectangular part of a tensor. For a tensor without dimensions both are empty."""

    offsets: tuple[int, ...]
    """Index of its first element, by dimension of the whole tensor."""
    sizes: tuple[int, ...]
    """By dimension, in elements."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def intersection(self, other: Box) -> Box | None:
        """The elements that both boxes have; None if there are none. Both are boxes of the same tensor."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(map(min, self._stops, other._stops))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))

    def slices_of(self, part: Box) -> tuple[slice, ...]:
        """Where the elements of ``part``, which lies in this box, are in a tensor that holds this box."""
        return tuple(
            slice(start - offset, start - offset + size)
            for start, offset, size in zip(part.offsets, self.offsets, part.sizes, strict=True)
        )

    @property
    def _stops(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return 0 in self.sizes

    def moved(self, origin: tuple[int, ...]) -> Box:
        """This box with offsets counted from ``origin`` instead of the first element of the tensor."""
        return Box(tuple(own - start for own, start in zip(self.offsets, origin, strict=True)), self.sizes)

    def pieces(self, numel: int) -> list[Box]:
        """This box, cut along its first dimension with more than one element into boxes of about ``numel`` elements or
        fewer. One after another, their elements are those of this box, row by row."""
        dimension = next((index for index, size in enumerate(self.sizes) if size > 1), None)
        if dimension is None or self.numel <= numel:
            return [self]
        rows, made = max(1, numel * self.sizes[dimension] // self.numel), []
        for start in range(0, self.sizes[dimension], rows):
            offsets, sizes = list(self.offsets), list(self.sizes)
            offsets[dimension] += start
            sizes[dimension] = min(rows, self.sizes[dimension] - start)
            made.append(Box(tuple(offsets), tuple(sizes)))
        return made

    def without(self, part: Box) -> list[Box]:
        """Boxes that together hold the elements of this box that are not in ``part``, which lies in this box."""
        left = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dimension, (start, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
            stop, part_stop = offsets[dimension] + sizes[dimension], start + size
            for first, last in ((offsets[dimension], start), (part_stop, stop)):
                if first < last:
                    left.append(
                        Box(
                            (*offsets[:dimension], first, *offsets[dimension + 1 :]),
                            (*sizes[:dimension], last - first, *sizes[dimension + 1 :]),
                        )
                    )
            offsets[dimension], sizes[dimension] = start, size
        return left


def whole(shape: tuple[int, ...]) -> Box:
    """All of a tensor of this shape."""
    return Box((0,) * len(shape), shape)


def cover(needed: Box, boxes: Sequence[Box]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """Cut a box into parts that other boxes hold.

    Args:
        needed: what to find.
        boxes: where to look; what several boxes hold is taken from the first of them.

    Returns:
        Parts of ``needed``, which do not overlap, each with the index of the box that holds it; and what no box holds.
    """
    parts: list[tuple[int, Box]] = []
    left = [] if needed.is_empty else [needed]
    for index, box in enumerate(boxes):
        if not left:
            break
        rest: list[Box] = []
        for piece in left:
            common = piece.intersection(box)
            if common is None:
                rest.append(piece)
            else:
                parts.append((index, common))
                rest += piece.without(common)
        left = rest
    return parts, left
