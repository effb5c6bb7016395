"""Pieces of a model's tensors: what one rank holds, saves and loads.

A tensor of the whole model, as one process would hold it, may be divided among ranks by tensor parallelism and by ZeRO.
Each rank holds boxes of it. A part of a fused query-key-value weight is three boxes; a slice of a flattened tensor, as
ZeRO cuts it, is a few boxes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "MANIFEST",
    "METADATA",
    "REPLACED",
    "STATES",
    "TEMPORARY",
    "Bitmap",
    "Box",
    "Location",
    "RunState",
    "StorageTier",
    "TensorPiece",
    "cover",
    "is_replaced",
    "layer_file",
    "meeting_folder",
    "part_file",
    "removed_folder",
    "step_folder",
    "step_of",
    "unfinished_folder",
    "whole",
]


# Run state -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What one rank saves beside its tensors. What all ranks share is taken from rank 0."""

    epoch: int = 0
    """The epoch that the run is in."""
    plan: str = ""
    """Digest of the plan, or empty."""
    param_groups: Any = None
    """Settings of the optimizer, e.g. learning rates, as JSON."""
    common: Mapping[str, Any] = field(default_factory=dict)
    """States that all ranks share, e.g. of the scheduler and the loader, as JSON."""
    rank: Mapping[str, Any] = field(default_factory=dict)
    """States of this rank, as JSON."""
    binary: Mapping[str, bytes] = field(default_factory=dict)
    """States of this rank that are bytes, e.g. of random generators."""


# Names ---------------------------------------------------------------------------------------------------------------


MANIFEST = "manifest.json"
"""Written last: a folder without it is no checkpoint."""
METADATA = ".metadata"
"""The index of torch's distributed checkpoints, for torch's own tools."""
STATES = "states.bin"
"""Binary states of ranks, e.g. of random generators."""
REPLACED = ".replaced"
"""Ending of a checkpoint's folder while another checkpoint of the same step takes its place."""
TEMPORARY = (".unfinished-step-", ".removed-step-", ".meeting-")
"""How the names of folders start that are being written, or removed, or hold messages between ranks."""

STEP = re.compile(rf"step-(\d{{8,}})({re.escape(REPLACED)})?")


def step_folder(step: int) -> str:
    """Folder of the checkpoint of a step, e.g. ``step-00000120``."""
    return f"step-{step:08d}"


def unfinished_folder(step: int, run: str, number: int, leader: int | str) -> str:
    """Folder of a checkpoint while it is written: the ``number``-th save of a run. ``leader`` is the rank that will
    finish it."""
    return f".unfinished-{step_folder(step)}.{run}.{number}.{leader}"


def removed_folder(folder: str) -> str:
    """Name of a folder while it is removed."""
    return f".removed-{folder}"


def meeting_folder(run: str) -> str:
    """Folder for messages between the ranks of a run."""
    return f".meeting-{run}"


def step_of(folder: str) -> int | None:
    """The step of a checkpoint's folder; None if it is another folder."""
    found = STEP.fullmatch(folder)
    return int(found[1]) if found else None


def is_replaced(folder: str) -> bool:
    """True if this is the old one of two checkpoints of the same step."""
    return folder.endswith(REPLACED)


def layer_file(layer: str, shard: str) -> str:
    """File of a layer's shard, e.g. ``block-0007.tp0of2.distcp``."""
    return f"{quote(layer, safe='')}.{quote(shard, safe='')}.distcp"


def part_file(node: str) -> str:
    """File that lists what a node has written, e.g. ``part-gpu-3.json``."""
    return f"part-{quote(node, safe='')}.json"


# Box -----------------------------------------------------------------------------------------------------------------


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
        """True if it has no elements."""
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


@dataclass(frozen=True)
class TensorPiece:
    """A box of a tensor, and the memory in which this rank has it: to save from, or to load into."""

    layer: str
    """The layer that the tensor belongs to, e.g. ``block-0007``, ``embedding`` or ``head``."""
    key: str
    """Name of the tensor in the checkpoint: what it is, a dot, and the name of the parameter in the model of one
    process, e.g. ``param.transformer.h.7.attn.c_attn.weight`` or ``exp_avg.transformer.h.7.attn.c_attn.weight``."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    data: Tensor
    """``[box.sizes]``: a view of the memory, of the type in which the tensor is saved."""
    shard: str
    """Names the division that the box belongs to, e.g. ``tp0of2``; the same on all ranks that hold the same boxes of a
    layer. A layer has one file for each of its shards."""


# Bitmap --------------------------------------------------------------------------------------------------------------
#
# Which node has which boxes of which checkpoint, and in which tier.
#
# Source: AutoHet, section IV-C ("layer bitmap"), with boxes of tensors in place of tensor-parallel shards of layers.


class StorageTier(IntEnum):
    """Where a box is, the fastest first."""

    MEMORY = 0
    DISK = 1
    """Of the node."""
    SHARED = 2
    """The shared folder, which every node reaches."""


class Location(NamedTuple):
    """A place that has a box."""

    node: str
    """Empty for the shared folder."""
    tier: StorageTier


class Bitmap:
    """The locations of each box of each tensor, by step and layer."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, str, str], dict[Box, set[Location]]] = defaultdict(dict)

    def add(self, step: int, layer: str, key: str, box: Box, location: Location) -> None:
        """Note that ``location`` has a box of the tensor ``key``."""
        self._boxes[step, layer, key].setdefault(box, set()).add(location)

    def discard(self, step: int, layer: str, location: Location) -> None:
        """Note that ``location`` has nothing of a layer any more, for example because its file is damaged."""
        for (of_step, of_layer, _), boxes in self._boxes.items():
            if (of_step, of_layer) == (step, layer):
                for locations in boxes.values():
                    locations.discard(location)

    def boxes(self, step: int, layer: str, key: str) -> Iterator[tuple[Box, frozenset[Location]]]:
        """All boxes of a tensor, sorted."""
        for box, locations in sorted(self._boxes.get((step, layer, key), {}).items()):
            yield box, frozenset(locations)
