"""Choice of the rank that reads each box, and of the ranks that it sends the box to."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .pieces import Bitmap, Box, Location, StorageTier, cover


class Need(NamedTuple):
    layer: str
    key: str
    box: Box
    element_bytes: int


class Read(NamedTuple):
    """A box that a rank reads: because it needs elements of it, to send them, or both."""

    layer: str
    key: str
    box: Box
    location: Location


class Fetch(NamedTuple):
    box: Box  # what a rank needs of the box that is read
    bytes: int
    read: Read  # a box in a file is read whole: it has one check sum


def choose_sources(
    needs: Mapping[int, Sequence[Need]], node_of: Mapping[int, str], bitmap: Bitmap
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
                for box, locations in bitmap.boxes(need.layer, need.key)
                for location in locations
            ]
            while left:
                box = left.pop()
                usable = [
                    (distance, given[location.node], location, -common.numel, common, other)
                    for distance, other, location in candidates
                    if (common := other.intersection(box)) is not None
                ]
                if not usable:
                    raise LookupError(
                        f"no node and no shared folder has {need.key} of step {bitmap.step} at {box.offsets} with "
                        f"sizes {box.sizes}"
                    )
                distance, _, location, _, common, stored = min(usable)
                size = common.numel * need.element_bytes
                source = common if location.tier == StorageTier.MEMORY else stored
                chosen[rank].append(Fetch(common, size, Read(need.layer, need.key, source, location)))
                if distance >= _FROM_PEERS and location.node:
                    given[location.node] += size
                left += box.without(common)
    return chosen


_FROM_PEERS = 2


def _distance(location: Location, node: str) -> int:
    if location.tier == StorageTier.SHARED:
        return 4
    return location.tier if location.node == node else _FROM_PEERS + location.tier


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

    Ranks read boxes of their own node that they need whole. Other boxes are read once, by the rank that has read the
    fewest bytes: of those on the node that need a part, else of the node; for the shared folder, of all that need a
    part. It sends each rank what that needs. What several readers can send, the one sends that has sent the fewest.
    """
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, node in sorted(node_of.items()):
        ranks_of[node].append(rank)
    reads: dict[int, list[Read]] = {rank: [] for rank in fetches}
    transfers: list[Transfer] = []
    bytes_read: dict[int, int] = defaultdict(int)
    sent: dict[int, int] = defaultdict(int)
    groups = []
    for read, parts in _once(fetches).items():
        here = ranks_of[read.location.node] or sorted(fetches)
        needing = [rank for rank, _ in parts if rank in here]
        whole = [rank for rank, fetch in parts if rank in here and fetch.box == read.box]
        is_shared = read.location.tier == StorageTier.SHARED
        groups.append((read, parts, [] if is_shared else whole, needing or here))
    # First those of which it is clear who reads them; then the reads can be spread evenly.
    groups.sort(key=lambda group: (not group[2], len(set(group[3])), -_bytes(*group[:2])))
    for read, parts, whole, able in groups:
        readers = whole or [min(able, key=lambda rank: (bytes_read[rank], rank))]
        for rank in readers:
            reads[rank].append(read)
            bytes_read[rank] += _bytes(read, parts)
        sender = min(readers, key=lambda rank: (sent[rank], rank))
        for rank, fetch in parts:
            if rank not in readers:
                sent[sender] += fetch.bytes
                transfers.append(Transfer(sender, rank, read.layer, read.key, fetch.box))
    return reads, transfers


_Group = list[tuple[int, Fetch]]


def _bytes(read: Read, parts: _Group) -> int:
    fetch = parts[0][1]
    return fetch.bytes // fetch.box.numel * read.box.numel


def _once(fetches: Mapping[int, Sequence[Fetch]]) -> dict[Read, _Group]:
    """Fetches by what is read. A box on the disks of several nodes that need only a part of it is read on one of them,
    so that no more is read than is needed."""
    groups: dict[Read, _Group] = defaultdict(list)
    for rank in sorted(fetches):
        for fetch in fetches[rank]:
            groups[fetch.read].append((rank, fetch))
    alike: dict[tuple[str, Box], list[Read]] = defaultdict(list)
    for read in groups:
        alike[read.key, read.box].append(read)
    load: dict[Location, int] = defaultdict(int)
    for reads in alike.values():
        partial = [read for read in reads if cover(read.box, [fetch.box for _, fetch in groups[read]])[1]]
        if not partial or len(reads) == 1:
            continue
        target = min(
            [read for read in reads if read not in partial] or partial,
            key=lambda read: (load[read.location], read.location),
        )
        load[target.location] += target.box.numel
        for read in partial:
            if read != target:
                groups[target] += groups.pop(read)
    return groups


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
