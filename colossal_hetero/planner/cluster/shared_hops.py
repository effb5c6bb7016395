"""The channels over which pipelines send from stage to stage, when they share network cards.

[Note: shared hops] Pipelines that are alike run in step: when one of them sends over a cut, the others do so too. A
stage takes part in one exchange at a time, over the cut before it or over the one behind it. In an exchange every
device of the stage sends one message and receives one. So through a node's NICs of a kind go at most as many messages
at the same time, in each direction, as there are devices in the node whose stage has a neighbor over that network; NICs
are full duplex. Each message gets an equal share, at most the bandwidth of the channel. If some of these stages have
two such neighbors and others one, or pipelines differ, fewer messages may be on their way at times, so the result is an
upper bound. Hops inside a node share what the node says that all transfers inside share; both devices of a hop send at
the same time. As in ``all_reduce.py``, the bandwidth of a link between clusters is that of one pair of nodes.

[Note: hops between unlike stages] A stage consists of one or more tensor-parallel groups, each of which runs an equal
part of a micro-batch's samples, in order. A group sends the samples of another group directly to it. Between groups of
degrees t and t', min(t, t') pairs of devices send each sample, as Colossal-AI's t pairs do in stages that are alike;
the other devices of the larger group get it inside their node, which is not counted. Of two stages, the one with fewer
groups has more samples per group, so each of its groups sends and receives a message of 1 / groups of the micro-batch.
The hop takes as long as this message over the channel with the lowest bandwidth, of those to the groups that share its
samples. A node's network carries as many such messages
as its groups take part in; a group of the stage with more groups takes part in a fraction of a message. For equal
degrees and one group per stage this is what Note: shared hops says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from .all_reduce import INSIDE, nic_bandwidth
from .topology import Channel, Topology

__all__ = ["StageNodes", "group_exchanges", "hop_channels", "stage_channels", "stage_loads", "unlike_hop_channels"]


class StageNodes(NamedTuple):
    """Where a stage is."""

    nodes: tuple[int, ...]
    """The node of each of its tensor-parallel groups."""
    tensor_parallel: int
    """Devices in each group."""


Loads = dict[tuple[int, str], float]
"""Messages at the same time, by node and kind of network."""


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


def group_exchanges(senders: int, receivers: int) -> Iterator[tuple[int, int, Fraction]]:
    """Which groups of two stages have samples in common: sender, receiver, and their share of the micro-batch."""
    for sender in range(senders):
        for receiver in range(receivers):
            first = max(Fraction(sender, senders), Fraction(receiver, receivers))
            last = min(Fraction(sender + 1, senders), Fraction(receiver + 1, receivers))
            if first < last:
                yield sender, receiver, last - first


@lru_cache(maxsize=256)
def _messages(senders: int, receivers: int) -> tuple[tuple[int, int, float], ...]:
    """As :func:`group_exchanges`, with shares of a message, which has all samples of a group of the narrower stage."""
    narrow = min(senders, receivers)
    return tuple((one, other, float(narrow * share)) for one, other, share in group_exchanges(senders, receivers))


def unlike_hop_channels(topology: Topology, pipelines: Sequence[Sequence[StageNodes]]) -> list[list[Channel]]:
    """The channel of each hop of each pipeline, ``[pipelines][stages − 1]``, if stages may differ.

    It is for messages of what one group of the sending stage sends. See Note: hops between unlike stages.

    Raises:
        ValueError: Neighboring stages cannot reach each other.
    """
    loads = stage_loads(topology, pipelines)
    return [[stage_channels(topology, a, b, loads) for a, b in pairwise(stages)] for stages in pipelines]


def stage_loads(topology: Topology, pipelines: Sequence[Sequence[StageNodes]]) -> Loads:
    """How many messages share a node's NICs of each kind, and its inside; as for :func:`unlike_hop_channels`."""
    loads: Loads = {}
    for stages in pipelines:
        hops = [_hop_loads(topology, a, b) for a, b in pairwise(stages)]
        arriving, leaving = [{}, *(end for _, end in hops)], [*(end for end, _ in hops), {}]
        for before, behind in zip(arriving, leaving, strict=True):
            # A stage takes part in one exchange at a time.
            _add(loads, {end: max(before.get(end, 0.0), behind.get(end, 0.0)) for end in before | behind})
    # Parts of messages whose sum is a whole number make up exactly that.
    return {end: round(messages, 9) for end, messages in loads.items()}


def _add(loads: Loads, more: Loads) -> None:
    for end, messages in more.items():
        loads[end] = loads.get(end, 0.0) + messages


def _hop_loads(topology: Topology, one: StageNodes, other: StageNodes) -> tuple[Loads, Loads]:
    """The messages of a hop, at the nodes of both stages."""
    pairs = min(one.tensor_parallel, other.tensor_parallel)
    ends: tuple[Loads, Loads] = ({}, {})
    for sender, receiver, messages in _messages(len(one.nodes), len(other.nodes)):
        a, b = one.nodes[sender], other.nodes[receiver]
        kind = INSIDE if a == b else topology.node_channel(a, b).kind
        _add(ends[0], {(a, kind): pairs * messages})
        _add(ends[1], {(b, kind): pairs * messages})
    return ends


def stage_channels(topology: Topology, one: StageNodes, other: StageNodes, loads: Loads) -> Channel:
    """The channel of a hop for messages of what one group of the stage ``one`` sends, if networks have these loads.

    Where ``loads`` are of other hops, at least the messages of this hop share a network.
    """
    own, more = _hop_loads(topology, one, other)
    _add(own, more)
    hops = {
        (one.nodes[sender], other.nodes[receiver])
        for sender, receiver, _ in _messages(len(one.nodes), len(other.nodes))
    }
    shared = []
    for a, b in sorted(hops):
        channel = topology.node_channel(a, b)
        if a == b:
            share = topology.nodes[a].inside_bytes_per_second / max(loads.get((a, INSIDE), 0.0), own[a, INSIDE])
        else:
            share = min(
                nic_bandwidth(topology, node, channel) / max(loads.get(end, 0.0), own[end])
                for node in (a, b)
                for end in [(node, channel.kind)]
            )
        shared.append(channel.limited(share))
    slowest = min(shared, key=lambda channel: (channel.bytes_per_second, -channel.latency_seconds))
    return slowest.repeated(len(one.nodes) / min(len(one.nodes), len(other.nodes)))
