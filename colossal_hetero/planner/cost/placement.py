"""Placement of slots: from which node each is taken, and for which stage of which pipeline (docs/algorithms.md, 3).

Data parallelism gets the faster links (:func:`place`; AutoHet, section III-C), or pipelines do
(:func:`place_together`). Kinds with less computing power get the earlier stages.

[Note: shared hops] Pipelines that are alike send over the same cut at the same time. A stage takes part in one exchange
at a time, in which each of its devices sends one message and receives one. So at most as many messages go through a
node's NICs of a kind, in each direction (full duplex), as it has devices whose stage has a neighbor over that network.
Each message gets an equal share, at most the bandwidth of the channel. This is an upper bound on the time: if stages
have one such neighbor or two, or pipelines differ, fewer messages may be sent at times. Hops inside a node share its
inside bandwidth; both devices of a hop send at once. As in ``all_reduce.py``, a link between clusters has the bandwidth
of one pair of nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, pairwise

import numpy as np
from numpy.typing import NDArray

from ..cluster.all_reduce import INSIDE
from ..cluster.topology import Channel, Topology
from .tp_groups import SlotKind

Place = tuple[int, int]
"""A slot: its kind, and which of that kind's slots."""


class NodeLinks:
    """The channel between each two nodes; equal links are looked up once, as each pair of 1,000 devices takes long."""

    def __init__(self, topology: Topology, message_bytes: float) -> None:
        """Channels are compared by their time for a message of ``message_bytes``."""
        kinds: dict[object, int] = {}
        self.node_kind = np.array(
            [
                kinds.setdefault((node.cluster, node.inside, node.nics, node.inside_bytes_per_second), len(kinds))
                for node in topology.nodes
            ]
        )
        self._kinds: list[int] = self.node_kind.tolist()
        self._nodes = topology.nodes
        self.message_bytes = message_bytes
        size = len(kinds)
        examples = [np.flatnonzero(self.node_kind == kind) for kind in range(size)]
        # Channel number by (kind of node, kind of node, whether it is the same node); −1 without a link.
        self._number = np.full((size, size, 2), -1)
        self.channels: list[Channel] = []
        self._numbers: dict[Channel, int] = {}
        self._seconds: list[float] = []
        for a, b in combinations_with_replacement(range(size), 2):
            if a == b:
                self._number[a, a, 1] = self.number(topology.nodes[examples[a][0]].inside)
                if len(examples[a]) < 2:
                    continue
            try:
                channel = topology.node_channel(int(examples[a][0]), int(examples[b][-1]))
            except ValueError:
                continue
            self._number[a, b, 0] = self._number[b, a, 0] = self.number(channel)
        # Without a link, number −1, the last kind of network stands for all.
        networks = [channel.kind for channel in self.channels]
        self._network = [[networks[number] for number in row] for row in self._number[:, :, 0].tolist()]
        self._hops: dict[object, int] = {}

    def number(self, channel: Channel) -> int:
        """The number of a channel, which gets one if it has none."""
        if channel not in self._numbers:
            self._numbers[channel] = len(self.channels)
            self.channels.append(channel)
            self._seconds.append(channel.seconds(self.message_bytes))
        return self._numbers[channel]

    def from_kind(self, kind: int) -> list[Channel]:
        """The different channels from a node of this kind, a number in :attr:`node_kind`, to other nodes."""
        numbers = np.unique(self._number[kind, :, 0])
        return [self.channels[number] for number in numbers.tolist() if number >= 0]

    def load(self, pipelines: Sequence[Sequence[int]], width: int) -> dict[tuple[str, int], int]:
        """Messages that share a node's NICs of a kind or its inside, by kind and node; see Note: shared hops."""
        load: dict[tuple[str, int], int] = {}
        network, kinds = self._network, self._kinds
        for nodes in pipelines:
            kind_before = ""
            for a, b in pairwise(nodes):
                kind = INSIDE if a == b else network[kinds[a]][kinds[b]]
                if kind != kind_before:
                    load[kind, a] = load.get((kind, a), 0) + width
                load[kind, b] = load.get((kind, b), 0) + width
                kind_before = kind
        return load

    def hops(self, pipelines: Sequence[Sequence[int]], width: int) -> list[list[int]]:
        """The numbers of the channels between neighboring stages, ``[pipelines][stages − 1]``, see :meth:`shared`."""
        load = self.load(pipelines, width)
        return [[self.shared(a, b, load, width) for a, b in pairwise(nodes)] for nodes in pipelines]

    def shared(self, a: int, b: int, load: Mapping[tuple[str, int], int], width: int) -> int:
        """The number of the channel between two nodes with the bandwidth that is left if NICs are shared by ``load``
        messages; −1 if there is no link. Each channel is computed once."""
        kind_a, kind_b = self._kinds[a], self._kinds[b]
        kind = INSIDE if a == b else self._network[kind_a][kind_b]
        key = kind_a, kind_b, a == b, load.get((kind, a), 0), load.get((kind, b), 0), width
        number = self._hops.get(key)
        if number is None:
            number = self._hops[key] = self._limited(a, b, kind, load, width)
        return number

    def _limited(self, a: int, b: int, kind: str, load: Mapping[tuple[str, int], int], width: int) -> int:
        number = int(self._number[self._kinds[a], self._kinds[b], int(a == b)])
        # In a hop inside a node both ends send.
        least = 2 * width if a == b else width
        channel, share = self.channels[number], 1.0
        for node in (a, b):
            cards = sum(nic.bytes_per_second for nic in self._nodes[node].nics if nic.kind == kind)
            rate = (self._nodes[node].inside_bytes_per_second if kind == INSIDE else cards) or channel.bytes_per_second
            share = min(share, rate / (max(load.get((kind, node), 0), least) * channel.bytes_per_second))
        if number >= 0 and share < 1.0:
            number = self.number(channel.limited(share * channel.bytes_per_second))
        return number

    def slowest(self, numbers: NDArray[np.int64], axis: int) -> NDArray[np.int64]:
        # The number of "no link" is −1.
        seconds = np.array([*self._seconds, np.inf])
        chosen = np.expand_dims(seconds[numbers].argmax(axis=axis), axis)
        return np.take_along_axis(numbers, chosen, axis).squeeze(axis)


@dataclass(frozen=True, eq=False)
class SlotPool:
    """Slots that the devices form, timed for one size of micro-batch."""

    tensor_parallel: int
    micro_batch: int
    kinds: tuple[SlotKind, ...]  # kinds of slots in ascending order of computing power
    total_micro_batches: int
    links: NodeLinks
    pipelines: int | None = None
    """Number of pipelines over which ZeRO stage 1 divides the optimizer's state. None: any number, and ZeRO stage 0."""

    @property
    def slots(self) -> int:
        return sum(len(kind.slots) for kind in self.kinds)

    @property
    def places(self) -> list[Place]:
        return [(kind, slot) for kind, each in enumerate(self.kinds) for slot in range(len(each.slots))]

    @cached_property
    def place_of(self) -> dict[tuple[int, ...], Place]:
        return {self.kinds[kind].slots[slot]: (kind, slot) for kind, slot in self.places}

    def allows(self, pipelines: int) -> bool:
        return self.pipelines in (None, pipelines)


def place(
    groups: Sequence[Sequence[int]],
    slots: Sequence[Sequence[tuple[int, ...]]],
    node_of: Sequence[int],
    cluster_of: Sequence[int],
) -> list[list[Place]]:
    """The slots of each pipeline in the order of its stages, ``[pipelines][stages]``, one kind after the other; of
    ``slots``, the ranks of each slot by kind, as many of each kind as ``groups`` says, ``[pipelines][kinds]``. As long
    as every pipeline needs a slot of the kind, one stage of all is taken from one node if a node has enough slots, else
    from one cluster, else from nodes in sequence. Slots that only some need follow, from as few nodes as possible."""
    pipelines: list[list[Place]] = [[] for _ in groups]
    for kind, available in enumerate(slots):
        needed = [int(group[kind]) for group in groups]
        assert sum(needed) <= len(available), "more slots are needed than there are"
        free = _by_node(available, node_of)
        while needed and min(needed) > 0:
            for pipeline, slot in zip(pipelines, _take(free, len(groups), cluster_of), strict=True):
                pipeline.append((kind, slot))
            needed = [count - 1 for count in needed]
        for pipeline, count in zip(pipelines, needed, strict=True):
            pipeline.extend((kind, slot) for slot in _take(free, count, cluster_of))
    return pipelines


def place_together(
    groups: Sequence[Sequence[int]],
    slots: Sequence[Sequence[tuple[int, ...]]],
    node_of: Sequence[int],
    cluster_of: Sequence[int],
) -> list[list[Place]]:
    """:func:`place`, but with the slots of each pipeline in as few nodes as possible, the longest pipeline first. Of
    each kind, a pipeline first takes slots from nodes that it is in already."""
    free = [_by_node(available, node_of) for available in slots]
    pipelines: list[list[Place]] = [[] for _ in groups]
    for pipeline in sorted(range(len(groups)), key=lambda pipeline: (-sum(groups[pipeline]), pipeline)):
        own: set[int] = set()
        for kind, count in enumerate(groups[pipeline]):
            here = {node: left for node, left in free[kind].items() if node in own}
            taken = _take(here, min(count, sum(map(len, here.values()))), cluster_of)
            free[kind] = {node: here.get(node, []) if node in own else left for node, left in free[kind].items()}
            free[kind] = {node: left for node, left in free[kind].items() if left}
            taken += _take(free[kind], count - len(taken), cluster_of)
            pipelines[pipeline] += [(kind, slot) for slot in taken]
            own |= {node_of[slots[kind][slot][0]] for slot in taken}
    return pipelines


def _by_node(slots: Sequence[tuple[int, ...]], node_of: Sequence[int]) -> dict[int, list[int]]:
    by_node: dict[int, list[int]] = {}
    for slot, ranks in enumerate(slots):
        by_node.setdefault(node_of[ranks[0]], []).append(slot)
    return by_node


def _take(free: dict[int, list[int]], count: int, cluster_of: Sequence[int]) -> list[int]:
    """Takes ``count`` slots out of ``free``, slots by node: from the node with the fewest that has enough, else from
    the cluster with the fewest that has enough, else from nodes in sequence."""
    if not count:
        return []
    enough = [node for node, slots in free.items() if len(slots) >= count]
    if enough:
        nodes = [min(enough, key=lambda node: (len(free[node]), node))]
    else:
        by_cluster: dict[int, int] = {}
        for node, slots in free.items():
            by_cluster[cluster_of[node]] = by_cluster.get(cluster_of[node], 0) + len(slots)
        fitting = [cluster for cluster, number in by_cluster.items() if number >= count]
        chosen = min(fitting, key=lambda cluster: (by_cluster[cluster], cluster)) if fitting else None
        nodes = sorted(free, key=lambda node: (cluster_of[node] != chosen, cluster_of[node], node))
    taken: list[int] = []
    for node in nodes:
        part = free[node][: count - len(taken)]
        taken += part
        if len(part) == len(free[node]):
            del free[node]
        else:
            free[node] = free[node][len(part) :]
        if len(taken) == count:
            break
    return taken
