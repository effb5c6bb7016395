"""The channels over which pipelines send from stage to stage, when they share network cards.

[Note: shared hops] Pipelines that are alike run in step: when one of them sends over a cut, the others do so too. A
stage takes part in one exchange at a time, over the cut before it or over the one behind it. In an exchange every
device of the stage sends one message and receives one. So through a node's NICs of a kind go at most as many messages
at the same time, in each direction, as there are devices in the node whose stage has a neighbor over that network; NICs
are full duplex. Each message gets an equal share, at most the bandwidth of the channel. If some of these stages have
two such neighbors and others one, or pipelines differ, fewer messages may be on their way at times, so the result is an
upper bound. Hops inside a node share what the node says that all transfers inside share; both devices of a hop send at
the same time. As in ``all_reduce.py``, the bandwidth of a link between clusters is that of one pair of nodes.

[Note: hops between unlike stages] Between tensor-parallel groups of degrees t and t', min(t, t') pairs of devices send
a micro-batch, as Colossal-AI's t pairs do in stages that are alike; the other devices of the larger group get it inside
their node, which is not counted. For equal degrees this is what Note: shared hops says.
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
    """Where a stage is."""

    node: int
    tensor_parallel: int
    """Devices in its group."""


Loads = Counter[tuple[int, str]]
"""Messages at the same time, by node and kind of network."""


def hop_channels(topology: Topology, pipelines: Sequence[Sequence[int]]) -> list[list[Channel]]:
    """The channel of each hop of each pipeline, ``[pipelines][stages − 1]``, with the bandwidth that a message gets.

    See Note: shared hops.
    """
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
    """The channel of each hop of each pipeline, ``[pipelines][stages − 1]``, if stages may have different degrees.

    See Note: hops between unlike stages.
    """
    loads = stage_loads(topology, pipelines)
    return [[stage_channel(topology, a, b, loads) for a, b in pairwise(stages)] for stages in pipelines]


def stage_loads(topology: Topology, pipelines: Sequence[Sequence[StageNode]]) -> Loads:
    """Number of messages that share a node's NICs of each kind, and its inside; as for :func:`unlike_hop_channels`."""
    loads: Loads = Counter()
    for stages in pipelines:
        hops = [_hop_loads(topology, a, b) for a, b in pairwise(stages)]
        arriving, leaving = [Counter(), *(end for _, end in hops)], [*(end for end, _ in hops), Counter()]
        for before, behind in zip(arriving, leaving, strict=True):
            # A stage takes part in one exchange at a time.
            loads.update(before | behind)
    return loads


def _hop_loads(topology: Topology, one: StageNode, other: StageNode) -> tuple[Loads, Loads]:
    """The messages of a hop, at the nodes of both stages."""
    pairs = min(one.tensor_parallel, other.tensor_parallel)
    kind = INSIDE if one.node == other.node else topology.node_channel(one.node, other.node).kind
    return Counter({(one.node, kind): pairs}), Counter({(other.node, kind): pairs})


def stage_channel(topology: Topology, one: StageNode, other: StageNode, loads: Loads) -> Channel:
    """The channel of a hop if networks have these loads.

    Where ``loads`` are of other hops, at least the messages of this hop share a network.
    """
    own, more = _hop_loads(topology, one, other)
    own.update(more)
    channel = topology.node_channel(one.node, other.node)
    shares = []
    for (node, kind), messages in own.items():
        inside = kind == INSIDE
        bandwidth = topology.nodes[node].inside_bytes_per_second if inside else nic_bandwidth(topology, node, channel)
        shares.append(bandwidth / max(messages, loads[node, kind]))
    return channel.limited(min(shares))
