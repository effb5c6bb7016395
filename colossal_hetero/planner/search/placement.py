"""Where a plan's slots stand: which node each comes from, and in which stage of which pipeline it is.

AutoHet, section III-C: tensor parallelism on the links inside a node, then data parallelism, then pipelines; kinds with
less computing power go to the earlier stages, which have less work and keep more micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Channel, Topology
from .tp_groups import SlotKind

__all__ = ["Links", "place"]

Place = tuple[int, int]
"""A slot: its kind, and which of that kind's slots."""


class Links:
    """How nodes reach each other, where nodes that are linked alike are looked up once.

    A cluster's nodes have few kinds of links, while asking for each pair of a thousand devices takes long.
    """

    def __init__(self, topology: Topology, message_bytes: float) -> None:
        """Channels are compared at ``message_bytes``."""
        kinds: dict[object, int] = {}
        self.node_kind = np.array(
            [kinds.setdefault((node.cluster, node.inside, node.nics), len(kinds)) for node in topology.nodes]
        )
        self.node_of = np.array([device.node for device in topology.devices])
        self.message_bytes = message_bytes
        size = len(kinds)
        examples = [np.flatnonzero(self.node_kind == kind) for kind in range(size)]
        # Channel number by (kind of node, kind of node, whether it is the same node); −1 where there is no way.
        self._number = np.full((size, size, 2), -1)
        self.channels: list[Channel] = []
        numbers: dict[Channel, int] = {}

        def number(channel: Channel) -> int:
            if channel not in numbers:
                numbers[channel] = len(self.channels)
                self.channels.append(channel)
            return numbers[channel]

        for a, b in combinations_with_replacement(range(size), 2):
            if a == b:
                self._number[a, a, 1] = number(topology.nodes[examples[a][0]].inside)
                if len(examples[a]) < 2:
                    continue
            try:
                channel = topology.node_channel(int(examples[a][0]), int(examples[b][-1]))
            except ValueError:
                continue
            self._number[a, b, 0] = self._number[b, a, 0] = number(channel)
        self.seconds = np.array([channel.seconds(message_bytes) for channel in self.channels] + [np.inf])
        """By channel number; infinite for "no way", which is the last."""

    def numbers(self, nodes_a: NDArray[np.int64], nodes_b: NDArray[np.int64]) -> NDArray[np.int64]:
        """Channel numbers between nodes, by element."""
        return self._number[self.node_kind[nodes_a], self.node_kind[nodes_b], (nodes_a == nodes_b).astype(int)]

    def slowest(self, nodes_a: NDArray[np.int64], nodes_b: NDArray[np.int64], axis: int) -> NDArray[np.int64]:
        """Of the channels along an axis, the one that takes longest."""
        numbers = self.numbers(nodes_a, nodes_b)
        chosen = np.expand_dims(self.seconds[numbers].argmax(axis=axis), axis)
        return np.take_along_axis(numbers, chosen, axis).squeeze(axis)

    @property
    def least_seconds(self) -> float:
        """Of a message over any of them."""
        return float(self.seconds.min())


def place(
    groups: Sequence[Sequence[int]],
    kinds: Sequence[SlotKind],
    node_of: Sequence[int],
    cluster_of: Sequence[int],
) -> list[list[Place]]:
    """Each pipeline's slots by stage.

    Kind by kind, as ``kinds`` are given (the weakest first): while every pipeline still lacks a slot of this kind, one
    stage of all pipelines is put into one node if some node has enough, else into one cluster, else into nodes in
    sequence; what only some pipelines have comes after, from as few nodes as possible.

    Args:
        groups: Slots by kind of each pipeline, ``[pipelines][kinds]``.
        node_of: Node by rank.
        cluster_of: Cluster by node.

    Raises:
        ValueError: the groups need more slots of a kind than there are.
    """
    pipelines: list[list[Place]] = [[] for _ in groups]
    for kind, offer in enumerate(kinds):
        lacking = [int(group[kind]) for group in groups]
        if sum(lacking) > len(offer.slots):
            raise ValueError(f"{sum(lacking)} slots of {offer.device} are needed, there are {len(offer.slots)}")
        free: dict[int, list[int]] = {}
        for slot, ranks in enumerate(offer.slots):
            free.setdefault(node_of[ranks[0]], []).append(slot)
        while lacking and min(lacking) > 0:
            for pipeline, slot in zip(pipelines, _take(free, len(groups), cluster_of), strict=True):
                pipeline.append((kind, slot))
            lacking = [count - 1 for count in lacking]
        for pipeline, count in zip(pipelines, lacking, strict=True):
            pipeline.extend((kind, slot) for slot in (_take(free, count, cluster_of) if count else []))
    return pipelines


def _take(free: dict[int, list[int]], count: int, cluster_of: Sequence[int]) -> list[int]:
    """``count`` slots out of ``free``: from the fullest node that has just enough, else from one cluster, else any."""
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
