"""The slots that the stages of a layout can have: its kinds of devices in groups of its degrees."""

from __future__ import annotations

from collections import Counter
from difflib import get_close_matches
from typing import NamedTuple

from ...io.text import count
from ..cluster.topology import Topology
from ..layout_line.plan_layout import PlanLayout, StageLayout

__all__ = ["SlotType", "TypeSlots", "available_slots", "slot_type"]


class SlotType(NamedTuple):
    """What slots have in common that can run the same stages."""

    device: str
    """Kind."""
    tensor_parallel: int
    """Devices of each slot, which are a tensor-parallel group."""


class TypeSlots(NamedTuple):
    """The slots of one type."""

    device: str
    """Kind."""
    slots: tuple[tuple[int, ...], ...]
    """Ranks of each."""


def slot_type(stage: StageLayout) -> SlotType:
    """The type of the slot that a stage needs."""
    return SlotType(stage.device, stage.tensor_parallel)


def available_slots(topology: Topology, layout: PlanLayout) -> dict[SlotType, TypeSlots]:
    """The slots of each type that the layout has.

    The devices of a slot are in one node, and of similar speed. If a kind of device has several degrees, the largest
    gets as many slots as it needs, from nodes that are left with the fewest devices over, and the smallest all others.

    Raises:
        ValueError: The cluster has no such devices, or too few of them.
    """
    stages = [stage for each in layout.pipelines for stage in each.stages]
    first = {slot_type(stage): stage for stage in reversed(stages)}
    needed = Counter(map(slot_type, stages))
    kinds = Counter(device.kind.name for device in topology.devices)
    slots: dict[SlotType, TypeSlots] = {}
    for device in dict.fromkeys(each.device for each in first):
        own = [each for each in first if each.device == device]
        _check_devices(
            layout, kinds, sum(stage.tensor_parallel for stage in stages if stage.device == device), first[own[0]]
        )
        free = _by_node(topology, device)
        own = sorted(own, key=lambda each: -each.tensor_parallel)
        for each in own:
            degree, wanted = each.tensor_parallel, needed[each]
            groups = _groups(free, degree, None if each is own[-1] else wanted)
            if len(groups) < wanted:
                layout.wrong(
                    f"the layout needs {count(wanted, 'group')} of {degree} × {device}, each inside a node, but the "
                    f"nodes of the cluster have only {len(groups)}",
                    first[each],
                )
            slots[each] = TypeSlots(device, groups)
    return slots


def _check_devices(layout: PlanLayout, kinds: Counter[str], needed: int, stage: StageLayout) -> None:
    device = stage.device
    if device not in kinds:
        close = get_close_matches(device, kinds, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        layout.wrong(f"the cluster has no {device}; it has {', '.join(kinds)}{hint}", stage)
    if needed > kinds[device]:
        layout.wrong(
            f"the layout needs {needed:,} × {device}, but the cluster has {kinds[device]:,}; "
            f"{needed - kinds[device]:,} are missing",
            stage,
        )


def _by_node(topology: Topology, device: str) -> dict[int, list[int]]:
    """The ranks of this kind of device in each node, the fastest first."""
    free: dict[int, list[int]] = {}
    for number, node in enumerate(topology.nodes):
        ranks = [rank for rank in node.devices if topology.devices[rank].kind.name == device]
        if ranks:
            free[number] = sorted(ranks, key=lambda rank: (-topology.devices[rank].speed, rank))
    return free


def _groups(free: dict[int, list[int]], degree: int, wanted: int | None) -> tuple[tuple[int, ...], ...]:
    """Takes ``wanted`` groups of devices in one node out of ``free``, or all that there are, in the order of nodes."""
    groups: dict[int, list[tuple[int, ...]]] = {}
    left = wanted
    for node in sorted(free, key=lambda node: (0 if wanted is None else len(free[node]) % degree, node)):
        number = len(free[node]) // degree
        if left is not None:
            number = min(number, left)
            left -= number
        groups[node] = [tuple(sorted(free[node][start * degree : (start + 1) * degree])) for start in range(number)]
        free[node] = free[node][number * degree :]
    return tuple(group for node in sorted(groups) for group in groups[node])
