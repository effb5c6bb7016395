"""Pieces of a model's tensors, and names of files. What tensor parallelism and ZeRO leave of a tensor on a rank is one
or more boxes, e.g. three of a fused query-key-value weight, and a few of a slice of a flattened tensor.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import add, sub
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State that one rank saves beside its tensors, as JSON but for ``binary``. What all ranks share is rank 0's."""

    epoch: int = 0
    plan: str = ""
    param_groups: Any = None
    common: Mapping[str, Any] = field(default_factory=dict)
    rank: Mapping[str, Any] = field(default_factory=dict)
    binary: Mapping[str, bytes] = field(default_factory=dict)
    """States of this rank that are bytes, e.g. of random generators."""


MANIFEST = "manifest.json"  # written last: a folder without it is no checkpoint.
STATES = "states.bin"
REPLACED = ".replaced"  # ending of a checkpoint's folder while another checkpoint of the same step takes its place
TEMPORARY = (".unfinished-step-", ".removed-step-")  # beginnings of names of folders that are being written or removed
STEP = re.compile(rf"step-(\d{{8,}})({re.escape(REPLACED)})?")


def step_folder(step: int) -> str:
    """Folder of the checkpoint of a step, e.g. ``step-00000120``."""
    return f"step-{step:08d}"


def unfinished_folder(step: int, run: str, number: int, leader: int | str) -> str:
    """Folder of the ``number``-th save of a run while it is written; ``leader`` is the rank that will finish it."""
    return f".unfinished-{step_folder(step)}.{run}.{number}.{leader}"


def step_of(folder: str) -> int | None:
    """The step of a checkpoint's folder; None if it is another folder."""
    found = STEP.fullmatch(folder)
    return int(found[1]) if found else None


def layer_file(layer: str, shard: str) -> str:
    """File of a layer's shard, e.g. ``block-0007.tp0of2.safetensors``. Shards have dots, layers have none."""
    return f"{quote(layer, safe='').replace('.', '%2E')}.{quote(shard, safe='')}.safetensors"


@dataclass(frozen=True, order=True)
class Box:
    """A rectangular part of a tensor: index of its first element, and sizes. Both are empty without dimensions."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def intersection(self, other: Box) -> Box | None:
        """Elements that both boxes, of the same tensor, have; None if there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = map(min, map(add, self.offsets, self.sizes), map(add, other.offsets, other.sizes))
        sizes = tuple(map(sub, stops, starts))
        return None if min(sizes, default=1) <= 0 else Box(starts, sizes)

    def slices_of(self, part: Box) -> tuple[slice, ...]:
        """Slices of ``part``, which lies in this box, in a tensor that holds this box."""
        return tuple(
            slice(start - offset, start - offset + size)
            for start, offset, size in zip(part.offsets, self.offsets, part.sizes, strict=True)
        )

    def pieces(self, numel: int) -> list[Box]:
        """Cut this box along its first dimension that is not 1 into boxes of about ``numel`` elements, in order."""
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
    return Box((0,) * len(shape), shape)


def cover(needed: Box, boxes: Sequence[Box]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """Disjoint parts of ``needed``, each with the index of the box that holds it; and what no box holds."""
    parts: list[tuple[int, Box]] = []
    left = [] if 0 in needed.sizes else [needed]
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


@dataclass(frozen=True)
class TensorPiece:
    """A box of a tensor, and the memory in which this rank has it: to save from, or to load into."""

    layer: str
    """The layer that the tensor belongs to, e.g. ``block-0007``, ``embedding`` or ``head``."""
    key: str
    """Kind, a dot, and the name in the model of one process, e.g. ``exp_avg.transformer.h.7.ln_1.weight``."""
    shape: tuple[int, ...]
    box: Box
    data: Tensor  # ``[box.sizes]``: a view of the memory, of the type in which the tensor is saved
    shard: str
    """Division that the box belongs to, e.g. ``tp0of2``: a file of the layer, with equal boxes on all its ranks."""


class StorageTier(IntEnum):
    """Kinds of places of a box, the fastest first."""

    MEMORY = 0
    DISK = 1
    SHARED = 2


class Location(NamedTuple):
    node: str  # name of the node; empty for the shared folder
    tier: StorageTier


class Bitmap:
    """The locations of each box of each tensor, by layer: AutoHet's layer bitmap (section IV-C), with boxes of tensors
    in place of tensor-parallel shards of layers."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self._boxes: dict[tuple[str, str], dict[Box, set[Location]]] = defaultdict(dict)

    def add(self, layer: str, key: str, box: Box, location: Location) -> None:
        self._boxes[layer, key].setdefault(box, set()).add(location)

    def discard(self, layer: str, location: Location) -> None:
        """Note that ``location`` has nothing of a layer any more, for example because its file is damaged."""
        for (of_layer, _), boxes in self._boxes.items():
            if of_layer == layer:
                for locations in boxes.values():
                    locations.discard(location)

    def boxes(self, layer: str, key: str) -> list[tuple[Box, frozenset[Location]]]:
        return [(box, frozenset(locations)) for box, locations in sorted(self._boxes.get((layer, key), {}).items())]
