"""Which rank sends which boxes to which rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..format.box import Box
from .bitmap import StorageTier
from .sources import Fetch

__all__ = ["Transfer", "transfers_between"]


class Transfer(NamedTuple):
    """A box that one rank has or can read, and another needs."""

    sender: int
    receiver: int
    layer: str
    key: str
    box: Box
    tier: StorageTier
    """Where the sender has it."""


def transfers_between(fetches: Mapping[int, Sequence[Fetch]], node_of: Mapping[int, str]) -> list[Transfer]:
    """The boxes that come from other nodes, sorted by layer, so that one layer after the other can be sent.

    Of the ranks of a node, the one sends that has sent the fewest bytes so far.

    Args:
        fetches: by receiving rank; see :func:`.sources.choose_sources`.
        node_of: node of each rank.
    """
    sent: dict[int, int] = defaultdict(int)
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, node in sorted(node_of.items()):
        ranks_of[node].append(rank)
    transfers: list[Transfer] = []
    for receiver in sorted(fetches):
        for fetch in fetches[receiver]:
            location = fetch.location
            if location.tier == StorageTier.SHARED or location.node == node_of[receiver]:
                continue
            sender = min(ranks_of[location.node], key=lambda rank: (sent[rank], rank))
            sent[sender] += fetch.bytes
            transfers.append(Transfer(sender, receiver, fetch.layer, fetch.key, fetch.box, location.tier))
    return sorted(transfers, key=lambda each: each.layer)
