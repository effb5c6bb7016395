"""Which rank reads which boxes, and which of them it sends to other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .pieces import Bitmap, Box, Location, StorageTier

__all__ = ["Fetch", "Need", "Read", "Transfer", "choose_sources", "layer_order", "reads_and_transfers"]


# Sources -------------------------------------------------------------------------------------------------------------


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
    """A box that one rank reads and another needs."""

    sender: int
    receiver: int
    layer: str
    key: str
    box: Box


def reads_and_transfers(
    fetches: Mapping[int, Sequence[Fetch]], node_of: Mapping[int, str]
) -> tuple[dict[int, list[Read]], list[Transfer]]:
    """What each rank reads, and what it sends.

    Ranks read what their own node has. What another node has, one of the ranks there reads once and sends to all that
    need it: one that needs it as well, if there is one, and of these the one that has sent the fewest bytes so far.
    From the shared folder, a box is read once: by the rank that has read the fewest bytes of those that need it, which
    sends it to the others.
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
    """All layers, in the order in which all ranks read and send them.

    Layers in different places take turns, so that all disks are busy from the start.
    """
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
