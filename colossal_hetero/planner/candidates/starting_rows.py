"""Ways to give out the slots of a pool to pipelines that are cut alike, from which exchanges of slots start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..cluster.topology import Topology
from ..slots.placement import Place, SlotPool
from .placed_pipelines import Rows

__all__ = ["starting_rows"]


def starting_rows(topology: Topology, pool: SlotPool, pipelines: int, stages: int) -> Iterator[Rows]:
    """Slots of each pipeline in the order of the stages, ``[pipelines][stages]``.

    They are taken from the slots of all nodes, and from those of nodes with faster networks only. The slots are sorted
    by speed, by memory, or by nearness. Either one pipeline after the other gets its slots, or one stage of all
    pipelines after the other; within each pipeline, the slots come in this order or in the opposite one.
    """
    number = pipelines * stages
    nodes = topology.nodes
    slots = [(kind, slot) for kind, each in enumerate(pool.kinds) for slot in range(len(each.slots))]
    node_of = {(kind, slot): topology.devices[pool.kinds[kind].slots[slot][0]].node for kind, slot in slots}
    network = {node: max((nic.bytes_per_second for nic in nodes[node].nics), default=0.0) for node in node_of.values()}

    def work(place: Place) -> float:
        return pool.kinds[place[0]].model_seconds

    def in_groups(places: Sequence[Place], size: int) -> Iterator[list[Place]]:
        """The places in groups that are each in one node, or in nodes with equal network cards."""
        yield from _in_groups(places, size, work, lambda place: node_of[place])
        yield from _in_groups(places, size, work, lambda place: nodes[node_of[place]].nics)

    for least in sorted(set(network.values())):
        places = sorted(
            (place for place in slots if network[node_of[place]] >= least),
            key=lambda place: (work(place), node_of[place]),
        )
        if len(places) < number:
            break
        by_memory = sorted(places, key=lambda place: -pool.kinds[place[0]].memory_bytes)
        for order in (places, by_memory, *in_groups(places, stages)):
            yield from _both_ways([order[first * stages : (first + 1) * stages] for first in range(pipelines)])
        for order in (places, by_memory, *in_groups(places, pipelines)):
            yield from _both_ways([order[first:number:pipelines] for first in range(pipelines)])


def _both_ways(rows: Sequence[Sequence[Place]]) -> Iterator[Rows]:
    yield tuple(tuple(row) for row in rows)
    yield tuple(tuple(row[::-1]) for row in rows)


def _in_groups(
    places: Sequence[Place], size: int, work: Callable[[Place], float], near: Callable[[Place], object]
) -> Iterator[list[Place]]:
    """The places in groups of ``size`` for which ``near`` is equal. Places that are left over come last.

    First come the fastest groups, or the fastest group of each node, or all groups of the largest node; a node is here
    what ``near`` says.
    """
    together: dict[object, list[Place]] = {}
    for place in places:
        together.setdefault(near(place), []).append(place)
    groups, rest = [], []
    largest_first = sorted(together.values(), key=lambda slots: (-len(slots), sum(map(work, slots))))
    for number, slots in enumerate(largest_first):
        for turn in range(len(slots) // size):
            group = slots[turn * size : (turn + 1) * size]
            groups.append((turn, sum(map(work, group)), number, group))
        rest += slots[len(slots) // size * size :]
    for ordered in (
        sorted(groups, key=lambda each: each[1:3]),
        sorted(groups, key=lambda each: each[:3]),
        sorted(groups, key=lambda each: (each[2], each[0])),
    ):
        yield [*(place for *_, group in ordered for place in group), *sorted(rest, key=work)]
