"""Choice of the rank that reads each box, and of the ranks that it sends the box to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .pieces import Bitmap, Box, Location, StorageTier

__all__ = ["Fetch", "Need", "Read", "Transfer", "choose_sources", "layer_order", "reads_and_transfers"]


# Sources -------------------------------------------------------------------------------------------------------------


class Need(NamedTuple):
    layer: str
    key: str
    box: Box
    element_bytes: int


class Fetch(NamedTuple):
    layer: str
    key: str
    box: Box
    location: Location
    bytes: int


def choose_sources(
    step: int, needs: Mapping[int, Sequence[Need]], node_of: Mapping[int, str], bitmap: Bitmap
) -> dict[int, list[Fetch]]:
    """Choose where each rank gets each of its boxes; the same arguments give the same answer on all ranks.

    In this order: memory of its node, disk of its node, memory of other nodes, their disks, shared folder. Of several
    nodes, the one that gives the fewest bytes so far; of overlapping boxes, the one with most of what is needed.
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


class Read(NamedTuple):
    """A box that a rank reads: because it needs it, to send it, or both."""

    layer: str
    key: str
    box: Box
    location: Location


class Transfer(NamedTuple):
    sender: int
    receiver: int
    layer: str
    key: str
    box: Box


def reads_and_transfers(
    fetches: Mapping[int, Sequence[Fetch]], node_of: Mapping[int, str]
) -> tuple[dict[int, list[Read]], list[Transfer]]:
    """Boxes that each rank reads, and what it sends.

    Ranks read what their own node has. What another node has, one rank there reads once and sends to all that need it:
    if possible one that needs it as well, and of these the one that has sent the fewest bytes. From the shared folder,
    the rank that has read the fewest bytes of those that need a box reads it once, and sends it to the others.
    """
    receivers: dict[tuple[Read, int], list[int]] = defaultdict(list)
    for rank in sorted(fetches):
        for fetch in fetches[rank]:
            receivers[Read(fetch.layer, fetch.key, fetch.box, fetch.location), fetch.bytes].append(rank)
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, node in sorted(node_of.items()):
        ranks_of[node].append(rank)
    reads: dict[int, list[Read]] = {rank: [] for rank in fetches}
    transfers: list[Transfer] = []
    read_from_shared: dict[int, int] = defaultdict(int)
    sent: dict[int, int] = defaultdict(int)
    for (read, size), ranks in receivers.items():
        if read.location.tier == StorageTier.SHARED:
            sender = min(ranks, key=lambda rank: (read_from_shared[rank], rank))
            read_from_shared[sender] += size
            readers = [sender]
        else:
            readers = [rank for rank in ranks if node_of[rank] == read.location.node]
            sender = min(readers or ranks_of[read.location.node], key=lambda rank: (sent[rank], rank))
            readers = readers or [sender]
        for rank in readers:
            reads[rank].append(read)
        for rank in ranks:
            if rank not in readers:
                sent[sender] += size
                transfers.append(Transfer(sender, rank, read.layer, read.key, read.box))
    return reads, transfers


def layer_order(reads: Mapping[int, Sequence[Read]]) -> list[str]:
    """All layers, as all ranks read and send them: those in different places take turns, so that all disks are busy."""
    places: dict[str, set[Location]] = defaultdict(set)
    for of_rank in reads.values():
        for read in of_rank:
            places[read.layer].add(read.location)
    order: list[tuple[int, str]] = []
    before: dict[frozenset[Location], int] = defaultdict(int)
    for layer, locations in sorted(places.items()):
        order.append((before[frozenset(locations)], layer))
        before[frozenset(locations)] += 1
    return [layer for _, layer in sorted(order)]
