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
from ..slots.tp_groups import divisors, slot_kinds, tensor_parallel_degrees

__all__ = ["SearchSpace", "check_schedules", "degrees_to_try", "micro_batch_sizes", "search_space", "slot_pools"]

MAX_SAMPLES = 10**9
"""In a global batch: its divisors are looked for one by one."""


class SearchSpace(NamedTuple):
    """What plans are made of."""

    topology: Topology
    """The machines with the times that were measured on them."""
    pools: list[SlotPool]
    """The slots for each tensor-parallel degree and micro-batch."""


def search_space(
    topology: Topology,
    profile: ModelProfile,
    global_batch: int,
    micro_batches: Sequence[int] | None,
    tensor_parallel: Sequence[int] | None,
) -> SearchSpace:
    """The slots that the devices form; arguments as for :func:`.make_plans.make_plans`.

    Raises:
        ValueError: An argument is not possible.
    """
    known = as_profiled(topology, profile)
    sizes = micro_batch_sizes(profile, global_batch, micro_batches)
    degrees = degrees_to_try(known, profile, tensor_parallel)
    return SearchSpace(known, slot_pools(known, profile, global_batch, sizes, degrees))


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
                message = float(np.max(kinds[0].costs.output_bytes))
                pools.append(SlotPool(degree, size, tuple(kinds), global_batch // size, NodeLinks(topology, message)))
    if not pools:
        measured = ", ".join(
            f"{device} with tensor parallelism {degree}: {', '.join(map(str, profile.micro_batches(device, degree)))}"
            for device in profile.devices
            for degree in profile.tensor_parallel_degrees(device)
        )
        raise ValueError(f"micro_batch={', '.join(map(str, sizes))} was not measured on any device; {measured} were")
    return pools
