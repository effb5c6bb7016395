"""Slots of different degrees that devices can form: all of a few devices, else one degree per kind of device."""

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

Key = tuple[str, float, int]
"""Kind of device, speed of the slowest device, and degree of slots."""
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
        name, speed, degree = key
        return slot_kind(
            topology,
            profile,
            (name, speed),
            slots,
            degree,
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
        slots: dict[Key, list[Ranks]] = {}
        looks: Counter[object] = Counter()
        for part in parts:
            # Devices that can be no slot stay idle.
            key = _form(topology, part) if len(part) in allowed else None
            if key is not None:
                slots.setdefault(key, []).append(part)
                looks[key, topology.devices[part[0]].node] += 1
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


def _form(topology: Topology, ranks: Ranks) -> Key | None:
    """The form of a slot of these devices; None if they are of several kinds or in several nodes."""
    devices = [topology.devices[rank] for rank in ranks]
    if len({(device.kind.name, device.node) for device in devices}) > 1:
        return None
    return devices[0].kind.name, min(device.speed for device in devices), len(ranks)


def alike_slots(topology: Topology, degree: int) -> Formation:
    """The slots if all have this degree."""
    groups = tensor_parallel_groups(topology, degree)
    return tuple(((name, speed, degree), tuple(slots)) for (name, speed), slots in groups.items())


def mixtures(
    topology: Topology, profile: ModelProfile, micro_batch: int, degrees: Sequence[int], most: int
) -> list[Formation]:
    """Formations in which all devices of a kind have one degree: the ``most`` with the largest power.

    Those in which all have the same degree are left out.
    """
    slots_of = {degree: alike_slots(topology, degree) for degree in degrees}
    names = sorted({device.kind.name for device in topology.devices})
    choices = []
    for name in names:
        forms = []
        for degree, slots in slots_of.items():
            own = tuple(each for each in slots if each[0][0] == name)
            measured = profile.micro_batches(name, degree) if degree in profile.tensor_parallel_degrees(name) else ()
            if own and measured and measured[0] <= micro_batch <= measured[-1]:
                power = sum(len(each) / float(sum(_seconds(profile, key, micro_batch))) for key, each in own)
                forms.append((power, degree, own))
        choices.append(forms or [(0.0, 0, ())])

    def combinations() -> Iterator[tuple[float, int, Formation]]:
        for number, chosen in enumerate(itertools.product(*choices)):
            if len({degree for _, degree, own in chosen if own}) > 1:
                formation = tuple(each for *_, own in chosen for each in own)
                yield sum(power for power, *_ in chosen), -number, formation

    return [formation for *_, formation in heapq.nlargest(most, combinations(), key=lambda each: each[:2])]


def _seconds(profile: ModelProfile, key: Key, micro_batch: int) -> tuple[float, float]:
    name, speed, degree = key
    costs = profile.costs(name, degree, micro_batch, speed)
    return float(costs.forward_seconds.sum()), float(costs.backward_seconds.sum())
