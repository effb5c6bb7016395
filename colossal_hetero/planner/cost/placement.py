"""Placement of slots: from which node each is taken, and for which stage of which pipeline.

AutoHet, section III-C: tensor parallelism gets the fastest links, inside a node, data parallelism the next, and
pipelines the slowest (:func:`place`). If gradients are small and activations large, pipelines need fast links more than
data parallelism does (:func:`place_together`). Kinds with less computing power get the earlier stages.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, islice, pairwise

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Channel, Topology
from .tp_groups import SlotKind

__all__ = ["NodeLinks", "Place", "SlotPool", "place", "place_together"]

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
        self.node_of = np.array([device.node for device in topology.devices])
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
        kinds_of_channel = sorted({channel.kind for channel in self.channels})
        self._kind_of = np.array([kinds_of_channel.index(channel.kind) for channel in self.channels])
        self._rate = np.array([channel.bytes_per_second for channel in self.channels])
        # Bandwidth of a node's NICs by kind, in the last row of its inside, [kinds + 1, nodes]; 0 without such a NIC.
        self._node_rate = np.array(
            [
                *(
                    [sum(nic.bytes_per_second for nic in node.nics if nic.kind == kind) for node in topology.nodes]
                    for kind in kinds_of_channel
                ),
                [node.inside_bytes_per_second for node in topology.nodes],
            ]
        )
        self._inside = len(kinds_of_channel)
        self._hops: dict[object, int] = {}

    def number(self, channel: Channel) -> int:
        """The number of a channel, which gets one if it has none."""
        if channel not in self._numbers:
            self._numbers[channel] = len(self.channels)
            self.channels.append(channel)
            self._seconds.append(channel.seconds(self.message_bytes))
        return self._numbers[channel]

    @property
    def between(self) -> list[Channel]:
        return [channel for kind in range(len(self._number)) for channel in self.from_kind(kind)]

    def from_kind(self, kind: int) -> list[Channel]:
        """The different channels from a node of this kind, a number in :attr:`node_kind`, to other nodes."""
        numbers = np.unique(self._number[kind, :, 0])
        return [self.channels[number] for number in numbers.tolist() if number >= 0]

    def numbers(self, nodes_a: NDArray[np.int64], nodes_b: NDArray[np.int64]) -> NDArray[np.int64]:
        """Channel numbers between nodes, element by element; -1 where there is no link."""
        same_node = np.asarray(nodes_a == nodes_b).astype(int)
        return np.asarray(self._number[self.node_kind[nodes_a], self.node_kind[nodes_b], same_node])

    def load(self, pipelines: Sequence[Sequence[int]], width: int) -> NDArray[np.int64]:
        """Messages that share a node's NICs of a kind or its inside, ``[kinds + 1, nodes]``; see Note: shared hops."""
        load = np.zeros(self._node_rate.shape, dtype=np.int64)
        for place, messages in self._load(pipelines, width)[0].items():
            load[place] = messages
        return load

    def _load(
        self, pipelines: Sequence[Sequence[int]], width: int
    ) -> tuple[Counter[tuple[int, int]], list[tuple[int, int, int]]]:
        """:meth:`load` by place, and for each hop its nodes and the kind of its NICs, or of the inside of its node."""
        load: Counter[tuple[int, int]] = Counter()
        hops = []
        for nodes in pipelines:
            kind_before = -1
            for a, b in pairwise(nodes):
                kind = self._inside if a == b else self._network(a, b)
                if kind != kind_before:
                    load[kind, a] += width
                load[kind, b] += width
                hops.append((a, b, kind))
                kind_before = kind
        return load, hops

    def shared(
        self, nodes_a: NDArray[np.int64], nodes_b: NDArray[np.int64], load: NDArray[np.int64], width: int
    ) -> NDArray[np.int64]:
        """:meth:`numbers` of the channels with the bandwidth that is left if NICs are shared by ``load`` messages."""
        numbers = self.numbers(nodes_a, nodes_b)
        same = nodes_a == nodes_b
        kind, rate = np.where(same, self._inside, self._kind_of[numbers]), self._rate[numbers]
        # In a hop inside a node both ends send.
        least = np.where(same, 2 * width, width)
        share = np.ones(numbers.shape)
        for nodes in (nodes_a, nodes_b):
            nodes = np.broadcast_to(nodes, numbers.shape)
            shared = np.where(self._node_rate[kind, nodes] > 0, self._node_rate[kind, nodes], rate)
            share = np.minimum(share, shared / (np.maximum(load[kind, nodes], least) * rate))
        share[numbers < 0] = 1.0
        limited = share < 1.0
        if not limited.any():
            return numbers
        distinct, place = np.unique(np.stack([numbers[limited], share[limited]]), axis=1, return_inverse=True)
        channels = [(self.channels[int(number)], each) for number, each in distinct.T.tolist()]
        new = [self.number(channel.limited(each * channel.bytes_per_second)) for channel, each in channels]
        numbers[limited] = np.array(new, dtype=np.int64)[place.reshape(-1)]
        return numbers

    def hops(self, pipelines: Sequence[Sequence[int]], width: int) -> list[list[int]]:
        """The numbers of the channels between neighboring stages, ``[pipelines][stages − 1]``, as from :meth:`load` and
        :meth:`shared`; −1 where there is no link. For many calls with few stages: each channel is computed once."""
        load, hops = self._load(pipelines, width)
        numbers = iter([self._shared_number(a, b, kind, load, width) for a, b, kind in hops])
        return [list(islice(numbers, len(nodes) - 1)) for nodes in pipelines]

    def _network(self, node_a: int, node_b: int) -> int:
        key = self._kinds[node_a], self._kinds[node_b]
        if key not in self._hops:
            self._hops[key] = int(self._kind_of[self.numbers(np.array(node_a), np.array(node_b))])
        return self._hops[key]

    def _shared_number(self, a: int, b: int, kind: int, load: Mapping[tuple[int, int], int], width: int) -> int:
        """The number of a channel whose ends are shared by so many messages."""
        key = self._kinds[a], self._kinds[b], a == b, load[kind, a], load[kind, b], width
        if key not in self._hops:
            loads = np.zeros(self._node_rate.shape, dtype=np.int64)
            loads[kind, [a, b]] = load[kind, a], load[kind, b]
            self._hops[key] = int(self.shared(np.array([a]), np.array([b]), loads, width)[0])
        return self._hops[key]

    def slowest(self, numbers: NDArray[np.int64], axis: int) -> NDArray[np.int64]:
        """The number of the slowest channel along an axis."""
        # The number of "no link" is −1.
        seconds = np.array([*self._seconds, np.inf])
        chosen = np.expand_dims(seconds[numbers].argmax(axis=axis), axis)
        return np.take_along_axis(numbers, chosen, axis).squeeze(axis)


@dataclass(frozen=True, eq=False)
class SlotPool:
    """Slots that the devices form, timed for one size of micro-batch."""

    tensor_parallel: int
    """Devices per slot."""
    micro_batch: int
    kinds: tuple[SlotKind, ...]
    """Kinds of slots in ascending order of computing power."""
    total_micro_batches: int
    """Per iteration, over all pipelines."""
    links: NodeLinks
    pipelines: int | None = None
    """Number of pipelines over which ZeRO stage 1 divides the optimizer's state. None: any number, and ZeRO stage 0."""

    @property
    def slots(self) -> int:
        return sum(len(kind.slots) for kind in self.kinds)

    @property
    def devices(self) -> int:
        return self.slots * self.tensor_parallel

    @cached_property
    def place_of(self) -> dict[tuple[int, ...], Place]:
        """Place of each slot by its ranks."""
        return {ranks: (kind, slot) for kind, each in enumerate(self.kinds) for slot, ranks in enumerate(each.slots)}

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
