"""Degrees, micro-batches and schedules that the search tries, checked, and the slots that they form."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from ..cluster.topology import Topology
from ..cost.pass_order import CHUNKED, SCHEDULES, Schedule
from ..cost.placement import NodeLinks, SlotPool
from ..cost.tp_groups import (
    SearchSpace,
    SlotKind,
    by_power,
    divisors,
    slot_kind,
    slot_kinds,
    tensor_parallel_degrees,
    tensor_parallel_groups,
)
from ..profile.fitted_profiles import as_profiled
from ..profile.layer_profile import ModelProfile
from .chunked_plans import DIVISION_METHODS

__all__ = [
    "MAX_FORMED_DEVICES",
    "Formation",
    "SlotsToTry",
    "alike_slots",
    "check_schedules",
    "degrees_to_try",
    "formations",
    "kinds_of",
    "micro_batch_sizes",
    "mixtures",
    "slot_pools",
    "slots_to_try",
    "wider_pools",
]


# Unlike slots --------------------------------------------------------------------------------------------------------


Key = tuple[str, float, int]
"""Kind of device, speed of the slowest device, and degree of slots."""
Ranks = tuple[int, ...]
Formation = tuple[tuple[Key, tuple[Ranks, ...]], ...]
"""Slots of each key."""
MakeKinds = Callable[[Formation], list[SlotKind]]


def kinds_of(
    topology: Topology, profile: ModelProfile, micro_batch: int, space: SearchSpace, pipelines: int | None
) -> MakeKinds:
    """Function that makes the kinds of slots of a formation, without those that were not measured."""

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
    """All divisions of the devices into slots, up to devices that are alike in a node, without parts of other ones."""
    found: dict[frozenset[tuple[object, int]], Formation] = {}
    together = [tuple(degrees)] if space.mixed_degrees else [(degree,) for degree in degrees]
    for parts, allowed in itertools.product(_partitions(list(range(len(topology.devices)))), together):
        slots: dict[Key, list[Ranks]] = {}
        looks: Counter[object] = Counter()
        for part in parts:
            key = _form(topology, part) if len(part) in allowed else None
            if key is not None:
                slots.setdefault(key, []).append(part)
                looks[key, topology.devices[part[0]].node] += 1
        numbered = frozenset((look, number) for look, count in looks.items() for number in range(count))
        found.setdefault(numbered, tuple((key, tuple(each)) for key, each in slots.items()))
    # Plans need not use every slot.
    return [formation for slots, formation in found.items() if not any(slots < others for others in found)]


def _partitions(items: list[int]) -> Iterator[list[Ranks]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in _partitions(rest):
        yield [(first,), *parts]
        for place, part in enumerate(parts):
            yield [*parts[:place], (first, *part), *parts[place + 1 :]]


def _form(topology: Topology, ranks: Ranks) -> Key | None:
    """Form of a slot of these devices; None if they are of several kinds or in several nodes."""
    devices = [topology.devices[rank] for rank in ranks]
    if len({(device.kind.name, device.node) for device in devices}) > 1:
        return None
    return devices[0].kind.name, min(device.speed for device in devices), len(ranks)


def alike_slots(topology: Topology, degree: int) -> Formation:
    groups = tensor_parallel_groups(topology, degree)
    return tuple(((name, speed, degree), tuple(slots)) for (name, speed), slots in groups.items())


def mixtures(
    topology: Topology, profile: ModelProfile, micro_batch: int, degrees: Sequence[int], most: int
) -> list[Formation]:
    """Formations of several degrees, one for all devices of a kind: the ``most`` with the largest power."""
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


MAX_FORMED_DEVICES = 4
"""Most devices for which slots of all forms are tried; with more, one form for each kind of device."""
MAX_MIXTURES = 12
MAX_POOLS = 12
"""Pools per number of pipelines in a wider search: the shortest expected plans, though memory may not suffice."""
MAX_SAMPLES = 10**9
"""Limit of a global batch, whose divisors are looked for one by one."""


class SlotsToTry(NamedTuple):
    topology: Topology
    """Machines with their measured times."""
    pools: list[SlotPool]
    micro_batches: list[int]
    degrees: list[int]


def slots_to_try(
    topology: Topology,
    profile: ModelProfile,
    global_batch: int,
    micro_batches: Sequence[int] | None,
    tensor_parallel: Sequence[int] | None,
) -> SlotsToTry:
    """Slots that the devices form; arguments as for :func:`.make_plans.make_plans`."""
    known = as_profiled(topology, profile)
    sizes = micro_batch_sizes(profile, global_batch, micro_batches)
    degrees = degrees_to_try(known, profile, tensor_parallel)
    return SlotsToTry(known, slot_pools(known, profile, global_batch, sizes, degrees), sizes, degrees)


def check_schedules(schedules: Sequence[Schedule], model_chunks: Sequence[int], method: str) -> None:
    for schedule in schedules:
        if schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {schedule!r}: valid are {', '.join(SCHEDULES)}")
        if schedule in CHUNKED and method not in DIVISION_METHODS:
            raise ValueError(
                f"the method {method!r} splits pipelines of the schedule 1f1b only; for {schedule} use "
                f"{', '.join(DIVISION_METHODS)}"
            )
    if not schedules:
        raise ValueError(f"no schedule to try; give at least one of {', '.join(SCHEDULES)}")
    for chunks in model_chunks:
        if chunks < 2:
            raise ValueError(f"model_chunks={chunks}: the interleaved schedule needs at least 2 chunks per stage")
    if not model_chunks:
        raise ValueError("model_chunks is empty; give at least one number of chunks per stage, such as 2")


def micro_batch_sizes(profile: ModelProfile, global_batch: int, sizes: Sequence[int] | None) -> list[int]:
    if global_batch < 1:
        raise ValueError(f"global_batch={global_batch}: must be at least 1")
    if global_batch > MAX_SAMPLES:
        raise ValueError(f"global_batch={global_batch}: must be at most {MAX_SAMPLES}")
    for size in sizes or ():
        if size < 1 or global_batch % size:
            raise ValueError(
                f"global_batch={global_batch} is not divisible by micro_batch={size}; "
                f"its divisors are {', '.join(map(str, divisors(global_batch)))}"
            )
    if sizes:
        return sorted(set(sizes))
    measured = sorted({times.micro_batch for times in profile.times})
    usable = [size for size in measured if global_batch % size == 0]
    if not usable:
        raise ValueError(
            f"global_batch={global_batch} is not divisible by any micro_batch that was measured "
            f"({', '.join(map(str, measured))})"
        )
    return usable


def degrees_to_try(topology: Topology, profile: ModelProfile, wanted: Sequence[int] | None) -> list[int]:
    measured = sorted({times.device for times in profile.times})
    for kind in sorted({device.kind.name for device in topology.devices}):
        if kind not in measured:
            raise ValueError(f"the profile has no times for kind {kind}; it has those of {', '.join(measured)}")
    degrees = tensor_parallel_degrees(topology, profile)
    for degree in wanted or ():
        if degree not in degrees:
            raise ValueError(
                f"tensor_parallel={degree} is not possible: the degrees that were measured and fit into a node are "
                f"{', '.join(map(str, degrees))}"
            )
    return sorted(set(wanted)) if wanted else degrees


def slot_pools(
    topology: Topology, profile: ModelProfile, global_batch: int, sizes: Sequence[int], degrees: Sequence[int]
) -> list[SlotPool]:
    pools = []
    for degree in degrees:
        for size in sizes:
            kinds = slot_kinds(topology, profile, degree, size)
            if kinds:
                pools.append(_pool(topology, degree, size, kinds, global_batch))
    if not pools:
        measured = ", ".join(
            f"{device} with tensor parallelism {degree}: {', '.join(map(str, profile.micro_batches(device, degree)))}"
            for device in profile.devices
            for degree in profile.tensor_parallel_degrees(device)
        )
        raise ValueError(f"micro_batch={', '.join(map(str, sizes))} was not measured on any device; {measured} were")
    return pools


def _pool(
    topology: Topology,
    degree: int,
    size: int,
    kinds: Sequence[SlotKind],
    global_batch: int,
    pipelines: int | None = None,
) -> SlotPool:
    message = min(float(np.max(kind.costs.output_bytes)) for kind in kinds)
    return SlotPool(degree, size, tuple(kinds), global_batch // size, NodeLinks(topology, message), pipelines)


_Part = dict[int | None, list[tuple[float, int, int | None, list[SlotKind]]]]
"""Expected seconds, micro-batch, number of pipelines and kinds of slots of each pool, by number of pipelines."""


def wider_pools(
    topology: Topology,
    profile: ModelProfile,
    global_batch: int,
    sizes: Sequence[int],
    degrees: Sequence[int],
    space: SearchSpace,
    below: float,
) -> list[list[list[SlotPool]]]:
    """Pools of a wider search, ``[parts][numbers of pipelines]``; arguments as for :func:`slot_pools`.

    For a few devices one part has all formations. Else slots have one form, then one for each kind of device, first in
    ZeRO stage 0, so that simpler plans are not missed for others that are expected to be faster.
    """
    few = len(topology.devices) <= MAX_FORMED_DEVICES
    fastest = max(channel.bytes_per_second for node in topology.nodes for channel in (node.inside, *node.nics))
    parts: dict[object, _Part] = {}
    for size in sizes:
        if few:
            forms = [("formed", each) for each in formations(topology, degrees, space)]
        else:
            forms = [("alike", alike_slots(topology, degree)) for degree in degrees]
            if space.mixed_degrees:
                forms += [("mixed", each) for each in mixtures(topology, profile, size, degrees, MAX_MIXTURES)]
        for pipelines in _numbers_of_pipelines(topology, space, global_batch // size, few):
            make = kinds_of(topology, profile, size, space, pipelines)
            for name, form in forms:
                if kinds := make(form):
                    seconds = _expected_seconds(kinds, global_batch // size, pipelines, fastest)
                    part = parts.setdefault(name if few else (name, pipelines is None), {})
                    part.setdefault(None if few else pipelines, []).append((seconds, size, pipelines, kinds))
    if not few:
        parts = {name: _shortest(part, below) for name, part in parts.items()}
    return [
        [
            [
                _pool(topology, kinds[-1].tensor_parallel, size, kinds, global_batch, pipelines)
                for _, size, pipelines, kinds in made
            ]
            for made in part.values()
        ]
        for part in parts.values()
    ]


def _shortest(part: _Part, below: float) -> _Part:
    """Shortest expected pools for each number of pipelines, all at most ``below`` seconds."""
    ordered = {pipelines: sorted(made, key=lambda each: each[0])[:MAX_POOLS] for pipelines, made in part.items()}
    near = {pipelines: [each for each in made if each[0] <= below] for pipelines, made in ordered.items()}
    return {pipelines: made for pipelines, made in near.items() if made}


def _expected_seconds(
    kinds: Sequence[SlotKind], micro_batches: int, pipelines: int | None, bytes_per_second: float
) -> float:
    """Estimated seconds of the best plan: slots are busy except while pipelines fill, and sum over a fast network."""
    slots = sum(len(kind.slots) for kind in kinds)
    power = sum(len(kind.slots) / kind.model_seconds for kind in kinds)
    most = min(int(sum(len(kind.slots) * kind.models_in_memory for kind in kinds)), micro_batches, slots)
    gradients = min(float(kind.costs.gradient_bytes.sum()) for kind in kinds)
    update = min(float(kind.costs.update_seconds.sum()) for kind in kinds)
    numbers = [number for number in divisors(micro_batches) if number <= most] if pipelines is None else [pipelines]
    return min(
        (
            (micro_batches + slots - number) / power
            + (update * number + 2 * (number - 1) * gradients / bytes_per_second) / slots
            for number in numbers
            if number <= most
        ),
        default=np.inf,
    )


def _numbers_of_pipelines(topology: Topology, space: SearchSpace, micro_batches: int, few: bool) -> list[int | None]:
    """Numbers of pipelines to try with ZeRO stage 1; None for any number, with stage 0."""
    numbers: list[int | None] = [None] if 0 in space.zero_stages else []
    if 1 in space.zero_stages:
        most = min(len(topology.devices), micro_batches)
        powers = {factor * 2**power for factor in (1, 3) for power in range(12)}
        numbers += range(1, most + 1) if few else sorted(number for number in powers if number <= most)
    return numbers
