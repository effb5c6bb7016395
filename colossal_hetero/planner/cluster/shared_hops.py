"""The channels over which pipelines send from stage to stage, when they share network cards.

[Note: shared hops] Pipelines that are alike run in step: when one of them sends over a cut, the others do so too. A
stage takes part in one exchange at a time, over the cut before it or over the one behind it. In an exchange every
device of the stage sends one message and receives one. So through a node's NICs of a kind go at most as many messages
at the same time, in each direction, as there are devices in the node whose stage has a neighbor over that network; NICs
are full duplex. Each message gets an equal share, at most the bandwidth of the channel. If some of these stages have
two such neighbors and others one, or pipelines differ, fewer messages may be on their way at times, so the result is an
upper bound. Hops inside a node share what the node says that all transfers inside share; both devices of a hop send at
the same time. As in ``all_reduce.py``, the bandwidth of a link between clusters is that of one pair of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from .all_reduce import INSIDE, nic_bandwidth
from .topology import Channel, Topology

__all__ = ["hop_channels"]


def hop_channels(topology: Topology, pipelines: Sequence[Sequence[int]]) -> list[list[Channel]]:
    """The channel of each hop of each pipeline, ``[pipelines][stages − 1]``, with the bandwidth that a message gets.

    See Note: shared hops.

    Args:
        topology: Machines.
        pipelines: Devices from the first to the last stage. With tensor parallelism every member of the groups is part
            of a pipeline of its own, because each sends its own message.

    Raises:
        ValueError: Neighboring stages cannot reach each other.
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
