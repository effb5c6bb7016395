"""The problem of a search: machines, model, batch, and the plans that are allowed; and the slots that devices form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from ..cluster.topology import Topology
from ..cost.pass_order import CHUNKED, SCHEDULES, Schedule
from ..cost.placement import NodeLinks, SlotPool
from ..cost.tp_groups import SlotKind, divisors, slot_kinds, tensor_parallel_degrees
from ..profile.fitted_profiles import as_profiled, on_links
from ..profile.layer_profile import ModelProfile
from ..stages.split_methods import METHODS

DIVISION_METHODS = ("exact", "uniform")  # methods of plans with chunks
MAX_SAMPLES = 10**9  # limit of a global batch, whose divisors are looked for one by one


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What to plan for, and which plans are allowed.

    Raises:
        ValueError: if the problem asks for what no machines can do, or the profile has no times for a kind of device.
    """

    topology: Topology
    """Machines; inside the search, with the kinds that the profile measured."""
    profile: ModelProfile
    global_batch: int
    micro_batches: Sequence[int] | None = None
    """Sizes to try, in samples; None: all that were measured and divide the global batch."""
    tensor_parallel: Sequence[int] | None = None
    """Degrees to try; None: all that were measured and fit into a node."""
    stages: Sequence[int] | None = None
    """Numbers of stages of a pipeline to try; None: any."""
    schedules: Sequence[Schedule] = ("1f1b",)
    model_chunks: Sequence[int] = (2,)
    """Chunks per stage in the schedule ``interleaved``."""
    method: str = "exact"
    """Method that cuts pipelines into stages, one of :data:`~.split_methods.METHODS`."""
    unequal: bool = True
    """True if replicas may differ in stages and micro-batches, in 1F1B."""
    all_devices: bool = False
    """True if no device may be left out."""
    recompute: bool = True
    """True if stages that do not fit otherwise may recompute, in 1F1B."""
    zero_stages: Sequence[int] = (0, 1)
    """ZeRO stages to try, in 1F1B; 1 for several replicas only."""
    overlap: bool = False
    """True if communication runs during passes between replicas, in 1F1B."""
    degrees: tuple[int, ...] = field(init=False)
    sizes: tuple[int, ...] = field(init=False)
    """Micro-batches that are tried."""
    _links_of: dict[float, NodeLinks] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        profile = on_links(self.profile, self.topology)
        if self.method not in METHODS:
            raise ValueError(f"unknown method {self.method!r}: valid are {', '.join(METHODS)}")
        for number in self.stages or ():
            if not 1 <= number <= profile.blocks:
                raise ValueError(
                    f"stages={number}: {profile.name} has {profile.blocks} blocks and each stage holds at least one; "
                    f"use 1 to {profile.blocks} stages"
                )
        self._check_schedules()
        if not self.zero_stages or set(self.zero_stages) - {0, 1}:
            raise ValueError(f"zero_stages={tuple(self.zero_stages)} cannot be planned; use 0, 1 or both")
        known = as_profiled(self.topology, profile)
        for name, value in (
            ("profile", profile),
            ("topology", known),
            ("sizes", tuple(_micro_batch_sizes(profile, self.global_batch, self.micro_batches))),
            ("degrees", tuple(_degrees(known, profile, self.tensor_parallel))),
        ):
            object.__setattr__(self, name, value)

    def _check_schedules(self) -> None:
        for schedule in self.schedules:
            if schedule not in SCHEDULES:
                raise ValueError(f"unknown schedule {schedule!r}: valid are {', '.join(SCHEDULES)}")
            if schedule in CHUNKED and self.method not in DIVISION_METHODS:
                raise ValueError(
                    f"the method {self.method!r} splits pipelines of the schedule 1f1b only; for {schedule} use "
                    f"{', '.join(DIVISION_METHODS)}"
                )
        if not self.schedules:
            raise ValueError(f"no schedule to try; give at least one of {', '.join(SCHEDULES)}")
        for chunks in self.model_chunks:
            if chunks < 2:
                raise ValueError(f"model_chunks={chunks}: the interleaved schedule needs at least 2 chunks per stage")
        if not self.model_chunks:
            raise ValueError("model_chunks is empty; give at least one number of chunks per stage, such as 2")
        if self.overlap and set(self.schedules) != {"1f1b"}:
            raise ValueError(f"overlap is predicted for the schedule 1f1b only, not for {', '.join(self.schedules)}")

    @cached_property
    def pools(self) -> list[SlotPool]:
        """The slots of each degree and micro-batch, in ZeRO stage 0 without recomputation."""
        found = [
            pool for degree in self.degrees for size in self.sizes if (pool := self.pool(degree, size)) is not None
        ]
        if not found:
            measured = ", ".join(
                f"{device} with tensor parallelism {degree}: "
                f"{', '.join(map(str, self.profile.micro_batches(device, degree)))}"
                for device in self.profile.devices
                for degree in self.profile.tensor_parallel_degrees(device)
            )
            raise ValueError(
                f"micro_batch={', '.join(map(str, self.sizes))} was not measured on any device; {measured} were"
            )
        return found

    def pool(self, degree: int, size: int, *, recompute: bool = False, pipelines: int | None = None) -> SlotPool | None:
        """Slots of this degree for micro-batches of ``size`` samples; None if they were not measured.

        With ``pipelines``, the slots of plans that have so many of them in ZeRO stage 1.
        """
        kinds = slot_kinds(self.topology, self.profile, degree, size, recompute=recompute, pipelines=pipelines)
        if not kinds:
            return None
        return SlotPool(degree, size, tuple(kinds), self.global_batch // size, self._links(kinds), pipelines)

    def with_pipelines(self, pool: SlotPool, number: int) -> SlotPool:
        """The slots of a pool with ZeRO stage 1 for another number of pipelines."""
        costs = partial(self.profile.costs, zero_shards=number)
        form = pool.tensor_parallel, pool.micro_batch
        kinds = tuple(
            replace(
                kind,
                costs=costs(kind.device, *form, kind.speed),
                recomputed=kind.recomputed and costs(kind.device, *form, kind.speed, recompute=True),
            )
            for kind in pool.kinds
        )
        return replace(pool, kinds=kinds, pipelines=number)

    def _links(self, kinds: Sequence[SlotKind]) -> NodeLinks:
        message = min(float(np.max(kind.costs.output_bytes)) for kind in kinds)
        if message not in self._links_of:
            self._links_of[message] = NodeLinks(self.topology, message)
        return self._links_of[message]


def _micro_batch_sizes(profile: ModelProfile, global_batch: int, sizes: Sequence[int] | None) -> list[int]:
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


def _degrees(topology: Topology, profile: ModelProfile, wanted: Sequence[int] | None) -> list[int]:
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
