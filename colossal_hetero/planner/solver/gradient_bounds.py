"""Least time in which pipelines sum their gradients, for any devices.

[Note: a lower bound on sums of gradients] Let D pipelines sum G bytes of gradients per device, with w devices per slot.
The gradients of a block, b bytes on one device, are summed by w rings, each with one device of each of the D slots that
hold the block. A ring over several nodes *crosses*. Where it leaves node v it has at most the bandwidth ch of the
fastest channel from v, and at most its share of the bandwidth R of all of the node's NICs. Each of its 2 (D − 1) steps
sends b / D. The rings of a slot run one after the other, or (pipelines that are cut alike) as one.

- A slot's ring shares the NICs with the w − 1 like rings of the same slot. So a slot with β bytes of blocks whose rings
  cross takes at least 2 (D − 1)·(β / D / min(ch, R / w) + latency).
- Let c of the s slots in a node hold a block whose rings cross. Each ring gets R / (w·⌈s / c⌉) if pipelines differ, and
  R / (w·rings) if they are cut alike. Summed over the node's slots, both take at least 2 (D − 1)/D · w·s·x / R, where x
  are the bytes of the different blocks in the node; so one slot takes 2 (D − 1)/D · w·x / R. If the node has y bytes,
  counted once for each slot, x ≥ y / min(s, D − 1), because the D slots that hold a block are not all in this node. And
  its slots need 2 (D − 1)/D · y / ch together. Over all nodes Σ y = D·G, so the time is at least 2 (D − 1)·G / Σ
  min(min(s, D − 1)·R / w, s·ch), and a latency.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Topology
from ..cost.placement import SlotPool


def slots_by_node(topology: Topology, pool: SlotPool) -> NDArray[np.int64]:
    """Numbers of slots, ``[nodes, kinds]``."""
    nodes = [[topology.devices[ranks[0]].node for ranks in kind.slots] for kind in pool.kinds]
    return np.stack([np.bincount(each, minlength=len(topology.nodes)) for each in nodes], axis=1)


class GradientBounds:
    """Lower bounds for the slots of one pool, see [Note: a lower bound on sums of gradients]."""

    def __init__(self, topology: Topology, pool: SlotPool) -> None:
        self._topology, self._pool = topology, pool
        self._width = pool.tensor_parallel
        sizes = np.sort(pool.kinds[0].costs.gradient_bytes)
        self._bytes = np.concatenate([[0.0], np.cumsum(sizes)])
        self._by_kind = slots_by_node(topology, pool)
        self._slots = self._by_kind.sum(axis=1)
        self._channel, self._cards = self._rates()

    @property
    def slots_in_a_node(self) -> int:
        return int(self._slots.max())

    @cached_property
    def most_in_a_node(self) -> NDArray[np.int64]:
        return np.asarray(self._by_kind.max(axis=0))

    @property
    def one_kind_per_node(self) -> bool:
        return bool(((self._by_kind > 0).sum(axis=1) <= 1).all())

    def of_pipelines(self, pipelines: int) -> float:
        """Seconds if the rings of all blocks cross; infinite if nodes cannot reach each other."""
        if pipelines < 2 or self._bytes[-1] <= 0:
            return 0.0
        holders = np.minimum(self._slots, pipelines - 1)
        rate = float(np.minimum(holders * self._cards / self._width, self._slots * self._channel).sum())
        if rate <= 0:
            return np.inf
        return 2 * (pipelines - 1) * (float(self._bytes[-1]) / rate + self._latency) * (1 - 1e-9)

    def of_blocks(self, pipelines: int, blocks: int) -> float:
        """Seconds if the rings of so many different blocks in one node cross; infinite if no node reaches another."""
        if pipelines < 2 or self._bytes[blocks] <= 0:
            return 0.0
        rate = float(self._cards[self._slots > 0].max()) / self._width
        if rate <= 0:
            return np.inf
        return 2 * (pipelines - 1) * (float(self._bytes[blocks]) / pipelines / rate + self._latency) * (1 - 1e-9)

    def message_seconds(self, message_bytes: float) -> float:
        """Seconds of a message of every device of a slot to another node; infinite if there is no link."""
        rate = float(np.minimum(self._channel, self._cards / self._width)[self._slots > 0].max())
        return self._latency + message_bytes / rate if rate > 0 else np.inf

    @cached_property
    def _latency(self) -> float:
        links = self._pool.links
        channels = [nic for node in self._topology.nodes for nic in node.nics]
        channels += [channel for kind in np.unique(links.node_kind).tolist() for channel in links.from_kind(kind)]
        return min((channel.latency_seconds for channel in channels), default=0.0)

    def _rates(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Bytes per second of the fastest channel to another node, and of all NICs of a node together; 0 without."""
        nodes, links = self._topology.nodes, self._pool.links
        fastest, cards = np.zeros(len(nodes)), np.zeros(len(nodes))
        for kind in range(int(links.node_kind.max()) + 1):
            alike = links.node_kind == kind
            channels = links.from_kind(kind)
            if channels:
                node = nodes[int(np.flatnonzero(alike)[0])]
                listed = {nic.kind for nic in node.nics}
                # A channel for which the node lists no card is a link to another cluster.
                links_out = {channel.kind: channel for channel in channels if channel.kind not in listed}
                rates = [each.bytes_per_second for each in (*node.nics, *links_out.values())]
                fastest[alike] = max(channel.bytes_per_second for channel in channels)
                cards[alike] = sum(rates)
        return fastest, cards
