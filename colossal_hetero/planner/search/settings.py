"""What the search is to try: degrees, micro-batches and schedules, checked, and the slots that they form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..chunks.chunked_plans import DIVISION_METHODS
from ..cluster.topology import Topology
from ..profile.as_profiled import as_profiled
from ..profile.layer_profile import ModelProfile
from ..schedules.pass_order import CHUNKED, SCHEDULES, Schedule
from ..slots.placement import NodeLinks, SlotPool
from ..slots.search_space import SearchSpace
from ..slots.tp_groups import SlotKind, divisors, slot_kinds, tensor_parallel_degrees
from ..slots.unlike_slots import alike_slots, formations, kinds_of, mixtures

__all__ = [
    *("MAX_FORMED_DEVICES", "SlotsToTry", "check_schedules", "degrees_to_try", "micro_batch_sizes", "slot_pools"),
    *("slots_to_try", "wider_pools"),
]

MAX_FORMED_DEVICES = 4
"""Up to so many devices, slots of all forms are tried; with more, one form for each kind of device."""
MAX_MIXTURES = 12
"""Mixtures of forms that are tried per size of micro-batch."""
MAX_POOLS = 12
"""Pools that are tried in a wider search of more devices, for each number of pipelines: those with the shortest
expected plans. Memory is not expected, so that nothing may fit with many pipelines, or with few."""
MAX_SAMPLES = 10**9
"""In a global batch: its divisors are looked for one by one."""


class SlotsToTry(NamedTuple):
    """What plans are made of."""

    topology: Topology
    """The machines with the times that were measured on them."""
    pools: list[SlotPool]
    """The slots for each tensor-parallel degree and micro-batch."""
    micro_batches: list[int]
    """Sizes, in samples."""
    degrees: list[int]
    """Tensor-parallel degrees."""


def slots_to_try(
    topology: Topology,
    profile: ModelProfile,
    global_batch: int,
    micro_batches: Sequence[int] | None,
    tensor_parallel: Sequence[int] | None,
) -> SlotsToTry:
    """The slots that the devices form; arguments as for :func:`.make_plans.make_plans`.

    Raises:
        ValueError: An argument is not possible.
    """
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
"""By number of pipelines: expected seconds, micro-batch, number of pipelines and kinds of slots of each pool."""


def wider_pools(
    topology: Topology,
    profile: ModelProfile,
    global_batch: int,
    sizes: Sequence[int],
    degrees: Sequence[int],
    space: SearchSpace,
    below: float,
) -> list[list[list[SlotPool]]]:
    """The pools of a wider search, in parts that are searched one after the other, ``[parts][numbers of pipelines]``;
    arguments as for :func:`slot_pools`.

    For a few devices there is one part with all formations. Else parts have slots of one form, then one form for each
    kind of device, first in ZeRO stage 0 and then in stage 1. In this order, so that a plan of simpler forms is never
    missed for others that are expected to be faster.

    Args:
        space: What stages may be.
        below: Seconds of a plan that is known. If there are more than a few devices, pools whose plans are expected to
            take longer are left out.
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
    """For each number of pipelines, the pools whose plans are expected to be the shortest, and below these seconds."""
    ordered = {pipelines: sorted(made, key=lambda each: each[0])[:MAX_POOLS] for pipelines, made in part.items()}
    near = {pipelines: [each for each in made if each[0] <= below] for pipelines, made in ordered.items()}
    return {pipelines: made for pipelines, made in near.items() if made}


def _expected_seconds(
    kinds: Sequence[SlotKind], micro_batches: int, pipelines: int | None, bytes_per_second: float
) -> float:
    """Estimated seconds of the best plan: all slots are busy except while pipelines fill, and sum over a fast network.

    Args:
        kinds: Of the slots.
        micro_batches: Per iteration.
        pipelines: How many pipelines there are; None for any number.
        bytes_per_second: Of the network.
    """
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
