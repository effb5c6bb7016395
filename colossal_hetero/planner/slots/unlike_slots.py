"""Slots of different degrees and widths that devices can form: all of a few devices, else one form per kind of device.

A slot of width w has w tensor-parallel groups, each inside a node. They are in ascending order of their nodes, which
decides which of them has which samples of a micro-batch.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from ..cluster.topology import Topology
from ..profile.layer_profile import ModelProfile
from .search_space import SearchSpace
from .tp_groups import SlotKind, by_power, slot_kind, tensor_parallel_groups

__all__ = ["Formation", "alike_slots", "formations", "kinds_of", "mixtures"]

Key = tuple[str, float, int, int]
"""Kind of device, speed of the slowest device, degree and width of slots."""
Ranks = tuple[int, ...]
Formation = tuple[tuple[Key, tuple[Ranks, ...]], ...]
"""The slots of each key."""
MakeKinds = Callable[[Formation], list[SlotKind]]


def kinds_of(
    topology: Topology, profile: ModelProfile, micro_batch: int, space: SearchSpace, pipelines: int | None
) -> MakeKinds:
    """A function that makes the kinds of slots of a formation, without those that were not measured."""

    @cache
    def made(key: Key, slots: tuple[Ranks, ...]) -> SlotKind | None:
        name, speed, degree, width = key
        return slot_kind(
            topology,
            profile,
            (name, speed),
            slots,
            degree,
            width,
            micro_batch,
            recompute=space.recompute,
            pipelines=pipelines,
        )

    return lambda formation: by_power(kind for each in formation if (kind := made(*each)) is not None)


def formations(topology: Topology, degrees: Sequence[int], space: SearchSpace) -> list[Formation]:
    """Every way to divide the devices into slots, once each up to devices that are alike in a node. Those that are part
    of another one are left out."""
    found: dict[frozenset[tuple[object, int]], Formation] = {}
    together = [tuple(degrees)] if space.mixed_degrees else [(degree,) for degree in degrees]
    for parts, allowed in itertools.product(_partitions(list(range(len(topology.devices)))), together):
        choices: list[list[Key | None]] = [[*_forms(topology, part, allowed, space.widths)] for part in parts]
        # Devices that can be no slot stay idle.
        for chosen in itertools.product(*(choice or [None] for choice in choices)):
            slots: dict[Key, list[Ranks]] = {}
            looks: Counter[object] = Counter()
            for part, key in zip(parts, chosen, strict=True):
                if key is not None:
                    slots.setdefault(key, []).append(part)
                    looks[key, tuple(topology.devices[rank].node for rank in part)] += 1
            # The n-th slot of a look is another one than the first.
            numbered = frozenset((look, number) for look, count in looks.items() for number in range(count))
            found.setdefault(numbered, tuple((key, tuple(each)) for key, each in slots.items()))
    # Plans need not use every slot.
    return [formation for slots, formation in found.items() if not any(slots < others for others in found)]


def _partitions(items: list[int]) -> Iterator[list[Ranks]]:
    """Every way to divide the items into parts, each ascending."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in _partitions(rest):
        yield [(first,), *parts]
        for place, part in enumerate(parts):
            yield [*parts[:place], (first, *part), *parts[place + 1 :]]


def _forms(topology: Topology, ranks: Ranks, degrees: Sequence[int], widths: Sequence[int]) -> list[Key]:
    """The forms of a slot of these devices."""
    devices = [topology.devices[rank] for rank in ranks]
    names, nodes = {device.kind.name for device in devices}, Counter(device.node for device in devices)
    if len(names) > 1:
        return []
    speed = min(device.speed for device in devices)
    return [
        (names.copy().pop(), speed, degree, len(ranks) // degree)
        for degree in degrees
        if all(count % degree == 0 for count in nodes.values()) and len(ranks) // degree in widths
    ]


def alike_slots(topology: Topology, degree: int) -> Formation:
    """The slots if all have one group of this degree."""
    return tuple(_slots(topology, degree, 1).items())


def mixtures(
    topology: Topology, profile: ModelProfile, micro_batch: int, degrees: Sequence[int], space: SearchSpace, most: int
) -> list[Formation]:
    """Formations in which all devices of a kind have one degree and width: the ``most`` with the largest power.

    Those in which all have the same degree and the width 1 are left out.
    """
    slots_of = {
        (degree, width): _slots(topology, degree, width)
        for degree, width in itertools.product(degrees, space.widths)
        if micro_batch % width == 0
    }
    names = sorted({device.kind.name for device in topology.devices})
    choices = []
    for name in names:
        forms = []
        for (degree, width), slots in slots_of.items():
            own = [(key, each) for key, each in slots.items() if key[0] == name]
            measured = profile.micro_batches(name, degree) if degree in profile.tensor_parallel_degrees(name) else ()
            if own and measured and measured[0] <= micro_batch // width <= measured[-1]:
                power = sum(len(each) / float(sum(_seconds(profile, key, micro_batch))) for key, each in own)
                forms.append((power, degree, width, tuple(own)))
        choices.append(forms or [(0.0, 0, 0, ())])

    def combinations() -> Iterator[tuple[float, int, Formation]]:
        for number, chosen in enumerate(itertools.product(*choices)):
            used = {(degree, width) for _, degree, width, own in chosen if own}
            alike = len({degree for degree, _ in used}) == 1
            if used and not (alike and {width for _, width in used} == {1}) and (alike or space.mixed_degrees):
                formation = tuple(each for _, _, _, own in chosen for each in own)
                yield sum(power for power, *_ in chosen), -number, formation

    return [formation for *_, formation in heapq.nlargest(most, combinations(), key=lambda each: each[:2])]


def _seconds(profile: ModelProfile, key: Key, micro_batch: int) -> tuple[float, float]:
    name, speed, degree, width = key
    costs = profile.costs(name, degree, micro_batch // width, speed)
    return float(costs.forward_seconds.sum()), float(costs.backward_seconds.sum())


def _slots(topology: Topology, degree: int, width: int) -> dict[Key, tuple[Ranks, ...]]:
    """Slots of ``width`` groups of equally fast devices, in as few nodes as possible; groups that are left over are
    not used."""
    slots: dict[Key, tuple[Ranks, ...]] = {}
    for (name, speed), groups in tensor_parallel_groups(topology, degree).items():
        by_node: dict[int, list[Ranks]] = {}
        for group in groups:
            by_node.setdefault(topology.devices[group[0]].node, []).append(group)
        whole, rest = [], []
        for here in by_node.values():
            stop = len(here) // width * width
            whole += here[:stop]
            rest += here[stop:]
        ordered = [*whole, *rest]
        made = [
            tuple(itertools.chain.from_iterable(ordered[start : start + width]))
            for start in range(0, len(ordered) - width + 1, width)
        ]
        if made:
            slots[name, speed, degree, width] = tuple(made)
    return slots
