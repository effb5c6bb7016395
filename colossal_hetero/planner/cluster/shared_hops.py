"""Channels over which pipelines send from stage to stage, when they share network cards.

[Note: shared hops] Pipelines that are alike send over the same cut at the same time. A stage takes part in one exchange
at a time, in which each of its devices sends one message and receives one. So at most as many messages go through a
node's NICs of a kind, in each direction (full duplex), as it has devices whose stage has a neighbor over that network.
Each message gets an equal share, at most the bandwidth of the channel. This is an upper bound on the time: if stages
have one such neighbor or two, or pipelines differ, fewer messages may be sent at times. Hops inside a node share its
inside bandwidth; both devices of a hop send at once. As in ``all_reduce.py``, a link between clusters has the bandwidth
of one pair of nodes.

[Note: hops between unlike stages] Between tensor-parallel groups of degrees t and t', min(t, t') pairs of devices send
a micro-batch; the other devices of the larger group get it inside their node, which is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from .all_reduce import INSIDE, nic_bandwidth
from .topology import Channel, Topology

__all__ = ["StageNode", "hop_channels", "stage_channel", "stage_loads", "unlike_hop_channels"]


class StageNode(NamedTuple):
    node: int
    tensor_parallel: int


Loads = Counter[tuple[int, str]]
"""Messages at the same time, by node and kind of network."""


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


def unlike_hop_channels(topology: Topology, pipelines: Sequence[Sequence[StageNode]]) -> list[list[Channel]]:
    """:func:`hop_channels` for stages of different degrees, see Note: hops between unlike stages."""
    loads = stage_loads(topology, pipelines)
    return [[stage_channel(topology, a, b, loads) for a, b in pairwise(stages)] for stages in pipelines]


def stage_loads(topology: Topology, pipelines: Sequence[Sequence[StageNode]]) -> Loads:
    """Messages that share a node's NICs of each kind, and its inside."""
    loads: Loads = Counter()
    for stages in pipelines:
        hops = [_hop_loads(topology, a, b) for a, b in pairwise(stages)]
        arriving, leaving = [Counter(), *(end for _, end in hops)], [*(end for end, _ in hops), Counter()]
        for before, behind in zip(arriving, leaving, strict=True):
            loads.update(before | behind)
    return loads


def _hop_loads(topology: Topology, one: StageNode, other: StageNode) -> tuple[Loads, Loads]:
    """Messages of a hop, at the nodes of both stages."""
    pairs = min(one.tensor_parallel, other.tensor_parallel)
    kind = INSIDE if one.node == other.node else topology.node_channel(one.node, other.node).kind
    return Counter({(one.node, kind): pairs}), Counter({(other.node, kind): pairs})


def stage_channel(topology: Topology, one: StageNode, other: StageNode, loads: Loads) -> Channel:
    """Channel of a hop under these loads; at least its own messages share a network."""
    own, more = _hop_loads(topology, one, other)
    own.update(more)
    channel = topology.node_channel(one.node, other.node)
    shares = []
    for (node, kind), messages in own.items():
        inside = kind == INSIDE
        bandwidth = topology.nodes[node].inside_bytes_per_second if inside else nic_bandwidth(topology, node, channel)
        shares.append(bandwidth / max(messages, loads[node, kind]))
    return channel.limited(min(shares))
