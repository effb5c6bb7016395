"""Pools with fewer slots or fewer kinds of slots, whose best plans are often missed among the plans of all slots.

A plan for part of a cluster is also a plan for the whole cluster. So a search that also plans for each of these parts
returns no worse plan than it would for one of them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from ..cluster.topology import Topology
from .placement import Place, SlotPool
from .tp_groups import SlotKind, by_power

__all__ = ["places_in", "restricted_pools"]

MAX_LEFT_OUT = 8
"""Types of nodes, and kinds of devices, that are left out in turn: those with the fewest devices."""
MAX_DEVICES = 16
SIMILAR_SPEEDS = (1.05, 1.3, 4.0)
"""Devices of one kind count as equally fast if the next faster one is faster by at most these factors."""


def restricted_pools(topology: Topology, pools: Sequence[SlotPool], *, whole: bool) -> Iterator[list[SlotPool]]:
    """The pools without each type of node, without each kind of device, and with similar speeds rounded down.

    With ``whole``, only those with all devices.

    Nodes are of one type if they have the same devices and links. In clusters of more than :data:`MAX_DEVICES` devices
    only the links count, and no kind is left out.
    """
    is_small = len(topology.devices) <= MAX_DEVICES
    ranks_by_type: dict[object, set[int]] = {}
    ranks_by_kind: dict[str, set[int]] = {}
    for number, node in enumerate(topology.nodes):
        devices = Counter((topology.devices[rank].kind.name, topology.devices[rank].speed) for rank in node.devices)
        look = int(pools[0].links.node_kind[number]), tuple(sorted(devices.items())) if is_small else ()
        ranks_by_type.setdefault(look, set()).update(node.devices)
    for rank, device in enumerate(topology.devices):
        ranks_by_kind.setdefault(device.kind.name, set()).add(rank)
    left_out = dict.fromkeys(
        frozenset(ranks)
        for parts in (ranks_by_type, ranks_by_kind)
        if len(parts) > 1 and (is_small or parts is ranks_by_type)
        for ranks in sorted(parts.values(), key=len)[:MAX_LEFT_OUT]
    )
    for ranks in () if whole else left_out:
        yield _changed(pools, partial(_without, ranks=ranks))
    seen = [[len(pool.kinds) for pool in pools]]
    for factor in SIMILAR_SPEEDS:
        rounded = _changed(pools, partial(_rounded_down, factor=factor))
        if (counts := [len(pool.kinds) for pool in rounded]) not in seen:
            seen.append(counts)
            yield rounded


def places_in(pool: SlotPool, other: SlotPool, rows: Sequence[Sequence[Place]]) -> list[list[Place]]:
    """The places in ``pool`` of slots that are given by their places in ``other``, a restricted pool of it."""
    place_of = {ranks: (kind, slot) for kind, each in enumerate(pool.kinds) for slot, ranks in enumerate(each.slots)}
    return [[place_of[other.kinds[kind].slots[slot]] for kind, slot in row] for row in rows]


def _changed(pools: Sequence[SlotPool], change: Callable[[Sequence[SlotKind]], list[SlotKind]]) -> list[SlotPool]:
    changed = [dataclasses.replace(pool, kinds=tuple(change(pool.kinds))) for pool in pools]
    return [pool for pool in changed if pool.kinds]


def _without(kinds: Sequence[SlotKind], ranks: frozenset[int]) -> list[SlotKind]:
    left = [
        dataclasses.replace(kind, slots=tuple(slot for slot in kind.slots if not ranks.intersection(slot)))
        for kind in kinds
    ]
    return [kind for kind in left if kind.slots]


def _rounded_down(kinds: Sequence[SlotKind], factor: float) -> list[SlotKind]:
    """The kinds, with each run of similar speeds of one device as one kind of the lowest speed."""
    by_device: dict[object, list[SlotKind]] = {}
    for kind in kinds:
        by_device.setdefault((kind.device, kind.tensor_parallel), []).append(kind)
    merged = []
    for same in by_device.values():
        same = sorted(same, key=lambda kind: kind.speed)
        starts = [0, *(i for i, (a, b) in enumerate(pairwise(same), 1) if b.speed > a.speed * factor), len(same)]
        for start, stop in pairwise(starts):
            slots = tuple(sorted(slot for kind in same[start:stop] for slot in kind.slots))
            merged.append(dataclasses.replace(same[start], slots=slots))
    return by_power(merged)
