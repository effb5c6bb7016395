"""The slots that the stages of a layout can have: its kinds of devices in groups of its degrees and widths."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
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
    """Devices in each tensor-parallel group."""
    width: int
    """Groups of each slot."""


class TypeSlots(NamedTuple):
    """The slots of one type."""

    device: str
    """Kind."""
    slots: tuple[tuple[int, ...], ...]
    """Ranks of each; of its groups one after the other."""


def slot_type(stage: StageLayout) -> SlotType:
    """The type of the slot that a stage needs."""
    return SlotType(stage.device, stage.tensor_parallel, stage.width)


def available_slots(topology: Topology, layout: PlanLayout) -> dict[SlotType, TypeSlots]:
    """The slots of each type that the layout has.

    The devices of a tensor-parallel group are in one node, and of similar speed; the groups of a slot are in one node
    where possible. If a kind of device has several degrees, the largest gets as many groups as it needs, from nodes
    that are left with the fewest devices over, and the smallest all others; widths likewise.

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
        _check_devices(layout, kinds, sum(stage.devices for stage in stages if stage.device == device), first[own[0]])
        free = _by_node(topology, device)
        degrees = sorted({each.tensor_parallel for each in own}, reverse=True)
        for degree in degrees:
            types = sorted((each for each in own if each.tensor_parallel == degree), key=lambda each: -each.width)
            wanted = sum(each.width * needed[each] for each in types)
            groups = _groups(free, degree, None if degree == degrees[-1] else wanted)
            found = sum(map(len, groups.values()))
            if found < wanted:
                layout.wrong(
                    f"the layout needs {count(wanted, 'group')} of {degree} × {device}, each inside a node, but the "
                    f"nodes of the cluster have only {found}",
                    first[types[0]],
                )
            for each in types:
                number = None if each is types[-1] else needed[each]
                slots[each] = TypeSlots(device, tuple(_joined(groups, each.width, number)))
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


def _groups(free: dict[int, list[int]], degree: int, wanted: int | None) -> dict[int, list[tuple[int, ...]]]:
    """Takes ``wanted`` groups of devices in one node out of ``free``, or all that there are; by node."""
    groups: dict[int, list[tuple[int, ...]]] = {}
    left = wanted
    for node in sorted(free, key=lambda node: (0 if wanted is None else len(free[node]) % degree, node)):
        number = len(free[node]) // degree
        if left is not None:
            number = min(number, left)
            left -= number
        groups[node] = [tuple(sorted(free[node][start * degree : (start + 1) * degree])) for start in range(number)]
        free[node] = free[node][number * degree :]
    return groups


def _joined(groups: dict[int, list[tuple[int, ...]]], width: int, wanted: int | None) -> Iterator[tuple[int, ...]]:
    """Takes ``wanted`` slots of so many groups each out of ``groups``, or all that there are.

    Slots inside one node come first, and then those whose groups are in several nodes.
    """
    left = sum(map(len, groups.values())) // width if wanted is None else wanted
    for node in sorted(groups):
        while left and len(groups[node]) >= width:
            yield tuple(itertools.chain.from_iterable(groups[node][:width]))
            groups[node] = groups[node][width:]
            left -= 1
    rest = [(node, group) for node in sorted(groups) for group in groups[node]]
    for start in range(0, left * width, width):
        taken = rest[start : start + width]
        for node, group in taken:
            groups[node].remove(group)
        yield tuple(itertools.chain.from_iterable(group for _, group in taken))
