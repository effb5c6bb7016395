"""Ways to give out slots to the stages of a layout: as the planner places them, and exchanges of two slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..chunks.arrangements import Ranks
from ..cluster.topology import Topology
from ..layout_line.plan_layout import PlanLayout
from ..slots.placement import place, place_together
from .layout_slots import SlotType, TypeSlots, slot_type

__all__ = ["exchanged_places", "first_places", "look"]

Slots = Mapping[SlotType, TypeSlots]
"""Slots by type."""


def first_places(topology: Topology, slots: Slots, layout: PlanLayout) -> Iterator[Ranks]:
    """Ranks of each stage of each pipeline, ``[pipelines][stages]``: as the planner places slots of these types.

    Slots are taken from all of them, or only from the best ones: those with the fastest networks, or the fastest
    devices. The best ones are also given out in this order, to one pipeline after the other.
    """
    node_of = [device.node for device in topology.devices]
    cluster_of = [node.cluster for node in topology.nodes]
    types = list(slots)
    wanted = [[types.index(slot_type(stage)) for stage in pipeline.stages] for pipeline in layout.pipelines]
    groups = [[row.count(each) for each in range(len(types))] for row in wanted]
    needed = [sum(numbers) for numbers in zip(*groups, strict=True)]

    def network(ranks: tuple[int, ...]) -> float:
        return -max((nic.bytes_per_second for nic in topology.nodes[node_of[ranks[0]]].nics), default=0.0)

    def slowness(ranks: tuple[int, ...]) -> float:
        return -min(topology.devices[rank].speed for rank in ranks)

    def best(*rules: Callable[[tuple[int, ...]], float]) -> list[TypeSlots]:
        ordered = [sorted(each.slots, key=lambda ranks: [rule(ranks) for rule in rules]) for each in slots.values()]
        return [
            TypeSlots(each.device, tuple(ranks[:number]))
            for each, ranks, number in zip(slots.values(), ordered, needed, strict=True)
        ]

    for available in (list(slots.values()), best(network, slowness), best(slowness, network)):
        for placed in (place, place_together):
            yield _rows(wanted, available, placed(groups, available, node_of, cluster_of))
        in_turn = [iter(range(len(each.slots))) for each in available]
        yield _rows(wanted, available, [[(kind, next(in_turn[kind])) for kind in row] for row in wanted])


def _rows(
    wanted: Sequence[Sequence[int]], available: Sequence[TypeSlots], placed: Sequence[Sequence[tuple[int, int]]]
) -> Ranks:
    """The slots of each pipeline in the order of its stages, of which ``wanted`` says the types."""
    rows = []
    for row, places in zip(wanted, placed, strict=True):
        of_type = {each: iter([slot for kind, slot in places if kind == each]) for each in set(row)}
        rows.append(tuple(available[each].slots[next(of_type[each])] for each in row))
    return tuple(rows)


def exchanged_places(ranks: Ranks, slots: Slots, slowest: int) -> Iterator[Ranks]:
    """The ranks after each exchange of two slots of one type, those of the pipeline ``slowest`` first."""
    type_of = {group: each for each, of_type in slots.items() for group in of_type.slots}
    used = [group for row in (ranks[slowest], *ranks[:slowest], *ranks[slowest + 1 :]) for group in row]
    free = sorted(type_of.keys() - set(used))
    for one, other in itertools.chain(itertools.combinations(used, 2), itertools.product(used, free)):
        if type_of[one] == type_of[other]:
            swap = {one: other, other: one}
            yield tuple(tuple(swap.get(group, group) for group in row) for row in ranks)


def look(topology: Topology, ranks: Ranks) -> object:
    """A key that is equal only for ranks that take equally long: of devices and nodes that are alike.

    Nodes are numbered as they come up, so ranks that take equally long can have different keys.
    """
    numbers: dict[int, int] = {}
    pipelines = []
    for row in ranks:
        looks = []
        for group in row:
            first = topology.devices[group[0]]
            node = topology.nodes[first.node]
            number = numbers.setdefault(first.node, len(numbers))
            speed = min(topology.devices[rank].speed for rank in group)
            looks.append((number, node.cluster, node.inside, node.inside_bytes_per_second, node.nics, speed))
        pipelines.append(tuple(looks))
    return tuple(pipelines)
