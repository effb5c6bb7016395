"""From where each rank gets the boxes that it needs: from the nearest place, and evenly from other nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..format.box import Box
from .bitmap import Bitmap, Location, StorageTier

__all__ = ["Fetch", "Need", "choose_sources"]


class Need(NamedTuple):
    """A box that a rank needs."""

    layer: str
    key: str
    box: Box
    element_bytes: int


class Fetch(NamedTuple):
    """A part of a needed box, and where to get it."""

    layer: str
    key: str
    box: Box
    location: Location
    bytes: int


def choose_sources(
    step: int, needs: Mapping[int, Sequence[Need]], node_of: Mapping[int, str], bitmap: Bitmap
) -> dict[int, list[Fetch]]:
    """Choose where each rank gets each of its boxes.

    In this order: memory of its node, disk of its node, memory of other nodes, disks of other nodes, shared folder. A
    box that several other nodes have comes from the one that gives the fewest bytes so far. If boxes in the same place
    overlap, the one with most of what is needed is taken. All ranks that call this function with the same arguments get
    the same answer.

    Args:
        step: of the checkpoint.
        needs: by rank.
        node_of: node of each rank.
        bitmap: what is where.

    Raises:
        LookupError: a box is nowhere.
    """
    given: dict[str, int] = defaultdict(int)
    chosen: dict[int, list[Fetch]] = {}
    for rank in sorted(needs):
        chosen[rank] = []
        for need in needs[rank]:
            left = [need.box]
            candidates = [
                (_distance(location, node_of[rank]), box, location)
                for box, locations in bitmap.boxes(step, need.layer, need.key)
                for location in locations
            ]
            while left:
                box = left.pop()
                usable = [
                    (distance, given[location.node], location, -common.numel, common)
                    for distance, other, location in candidates
                    if (common := other.intersection(box)) is not None
                ]
                if not usable:
                    raise LookupError(
                        f"no node and no shared folder has {need.key} of step {step} at {box.offsets} with sizes "
                        f"{box.sizes}"
                    )
                distance, _, location, _, common = min(usable)
                size = common.numel * need.element_bytes
                chosen[rank].append(Fetch(need.layer, need.key, common, location, size))
                if distance >= _FROM_PEERS and location.node:
                    given[location.node] += size
                left += box.without(common)
    return chosen


_FROM_PEERS = 2


def _distance(location: Location, node: str) -> int:
    if location.tier == StorageTier.SHARED:
        return 4
    return location.tier if location.node == node else _FROM_PEERS + location.tier
