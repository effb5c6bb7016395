"""Channels over which pipelines send from stage to stage, when they share network cards.

[Note: shared hops] Pipelines that are alike send over the same cut at the same time. A stage takes part in one exchange
at a time, in which each of its devices sends one message and receives one. So at most as many messages go through a
node's NICs of a kind, in each direction (full duplex), as it has devices whose stage has a neighbor over that network.
Each message gets an equal share, at most the bandwidth of the channel. This is an upper bound on the time: if stages
have one such neighbor or two, or pipelines differ, fewer messages may be sent at times. Hops inside a node share its
inside bandwidth; both devices of a hop send at once. As in ``all_reduce.py``, a link between clusters has the bandwidth
of one pair of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from .all_reduce import INSIDE, nic_bandwidth
from .topology import Channel, Topology

__all__ = ["hop_channels"]


def hop_channels(topology: Topology, pipelines: Sequence[Sequence[int]]) -> list[list[Channel]]:
    """Channel of each hop, ``[pipelines][stages − 1]``, with a message's share of the bandwidth (Note: shared hops)."""
    nodes = [[topology.devices[device].node for device in pipeline] for pipeline in pipelines]
    plain = [[topology.node_channel(*hop) for hop in pairwise(row)] for row in nodes]
    load: Counter[tuple[int, str]] = Counter()
    for row, channels in zip(nodes, plain, strict=True):
        used = [channel.kind if a != b else INSIDE for (a, b), channel in zip(pairwise(row), channels, strict=True)]
        for node, before, behind in zip(row, ["", *used], [*used, ""], strict=True):
            for kind in {before, behind} - {""}:
                load[node, kind] += 1

    def shared(channel: Channel, hop: tuple[int, int]) -> Channel:
        if hop[0] == hop[1]:
            return channel.limited(topology.nodes[hop[0]].inside_bytes_per_second / load[hop[0], INSIDE])
        shares = (nic_bandwidth(topology, node, channel) / load[node, channel.kind] for node in hop)
        return channel.limited(min(shares))

    return [
        [shared(channel, hop) for channel, hop in zip(channels, pairwise(row), strict=True)]
        for row, channels in zip(nodes, plain, strict=True)
    ]
