"""The slots from which the stages of a layout can be given out: its kinds of devices in groups of its degrees."""

from __future__ import annotations

from collections import Counter
from difflib import get_close_matches
from typing import NamedTuple

from ...io.text import count
from ..cluster.topology import Topology
from ..layout_line.plan_layout import PlanLayout, StageLayout

__all__ = ["SlotType", "TypeSlots", "available_slots", "slot_type"]

SlotType = tuple[str, int]
"""Kind of device, and how many of them share each block."""


class TypeSlots(NamedTuple):
    """The slots of one type."""

    device: str
    """Kind."""
    slots: tuple[tuple[int, ...], ...]
    """Ranks of each."""


def slot_type(stage: StageLayout) -> SlotType:
    """The type of the slot that a stage needs."""
    return stage.device, stage.tensor_parallel


def available_slots(topology: Topology, layout: PlanLayout) -> dict[SlotType, TypeSlots]:
    """The slots of each type that the layout has.

    The devices of a slot are in one node, and of similar speed. If a kind of device has several degrees, the largest
    gets as many slots as it needs, from nodes that are left with the fewest devices over, and the smallest all others.

    Raises:
        ValueError: The cluster has no such devices, or too few of them.
    """
    first = {slot_type(stage): stage for each in reversed(layout.pipelines) for stage in reversed(each.stages)}
    needed = Counter(slot_type(stage) for each in layout.pipelines for stage in each.stages)
    kinds = Counter(device.kind.name for device in topology.devices)
    slots: dict[SlotType, TypeSlots] = {}
    for device in dict.fromkeys(device for device, _ in first):
        degrees = sorted((degree for name, degree in needed if name == device), reverse=True)
        stage = first[device, degrees[0]]
        if device not in kinds:
            close = get_close_matches(device, kinds, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            layout.wrong(f"the cluster has no {device}; it has {', '.join(kinds)}{hint}", stage)
        total = sum(degree * needed[device, degree] for degree in degrees)
        if total > kinds[device]:
            layout.wrong(
                f"the layout needs {total:,} × {device}, but the cluster has {kinds[device]:,}; "
                f"{total - kinds[device]:,} are missing",
                stage,
            )
        free = _by_node(topology, device)
        for degree in degrees:
            wanted = None if degree == degrees[-1] else needed[device, degree]
            groups = _groups(free, degree, wanted)
            slots[device, degree] = TypeSlots(device, tuple(groups))
            found = len(groups)
            if found < needed[device, degree]:
                layout.wrong(
                    f"the layout needs {count(needed[device, degree], 'group')} of {degree} × {device}, each inside a "
                    f"node, but the nodes of the cluster have only {found}",
                    first[device, degree],
                )
    return slots


def _by_node(topology: Topology, device: str) -> dict[int, list[int]]:
    """The ranks of this kind of device in each node, the fastest first."""
    free: dict[int, list[int]] = {}
    for number, node in enumerate(topology.nodes):
        ranks = [rank for rank in node.devices if topology.devices[rank].kind.name == device]
        if ranks:
            free[number] = sorted(ranks, key=lambda rank: (-topology.devices[rank].speed, rank))
    return free


def _groups(free: dict[int, list[int]], degree: int, wanted: int | None) -> list[tuple[int, ...]]:
    """Takes ``wanted`` groups of devices in one node out of ``free``, or all that there are."""
    groups: list[tuple[int, ...]] = []
    for node in sorted(free, key=lambda node: (0 if wanted is None else len(free[node]) % degree, node)):
        number = len(free[node]) // degree
        if wanted is not None:
            number = min(number, wanted - len(groups))
        for _ in range(number):
            groups.append(tuple(sorted(free[node][:degree])))
            free[node] = free[node][degree:]
    return groups
