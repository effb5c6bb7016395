"""Which node has which boxes of which checkpoint, and in which tier.

Source: AutoHet, section IV-C ("layer bitmap"), with boxes of tensors in place of tensor-parallel shards of layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from ..format.box import Box

__all__ = ["Bitmap", "Location", "StorageTier"]


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
