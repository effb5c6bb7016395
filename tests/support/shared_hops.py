"""The channels of hops that share network cards, worked out one by one; see Note: shared hops in ``placement.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from colossal_hetero.planner.cluster.all_reduce import INSIDE
from colossal_hetero.planner.cluster.topology import Channel, Topology


def hop_channels(topology: Topology, pipelines: Sequence[Sequence[int]]) -> list[list[Channel]]:
    """Channel of each hop, ``[pipelines][stages − 1]``, with a message's share of the bandwidth."""
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
        shares = []
        for node in hop:
            rates = [nic.bytes_per_second for nic in topology.nodes[node].nics if nic.kind == channel.kind]
            shares.append((sum(rates) or channel.bytes_per_second) / load[node, channel.kind])
        return channel.limited(min(shares))

    return [
        [shared(channel, hop) for channel, hop in zip(channels, pairwise(row), strict=True)]
        for row, channels in zip(nodes, plain, strict=True)
    ]
