"""Which rank reads which boxes, and which of them it sends to other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..format.box import Box
from .bitmap import Location, StorageTier
from .sources import Fetch

__all__ = ["Read", "Transfer", "layer_order", "reads_and_transfers"]


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

    Args:
        fetches: by rank; see :func:`.sources.choose_sources`.
        node_of: node of each rank.
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
