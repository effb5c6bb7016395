"""The plan of a layout whose ranks are given, with its predicted times and memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from ..candidates.draft import Draft, DraftBuilder, write_plan
from ..candidates.micro_batch_division import divide_micro_batches
from ..chunks.arrangements import Ranks
from ..chunks.predict_chunked import predict_chunked_plan
from ..cluster.topology import Topology
from ..layout_line.plan_layout import PlanLayout
from ..plans.plan import Plan
from ..profile.layer_profile import ModelProfile
from ..profile.stage_costs import stage_costs
from ..schedules.zero_bubble import GraphSeconds
from ..slots.placement import NodeLinks, Place, SlotPool
from ..slots.tp_groups import SlotKind
from .layout_slots import SlotType, slot_type

__all__ = ["LayoutPricer"]

METHOD = "given"
"""Method of plans whose stages nobody looked for."""


class LayoutPricer:
    """Prices one layout with different ranks.

    Args:
        topology: Machines.
        profile: Times and sizes of the model's layers.
        layout: Whose micro-batches have a size. If it does not say how many there are, they are divided so that the
            last pipeline ends as early as possible.
        slots: The ranks of all stages that may be priced, by the type of their slots.
        global_batch: Samples per iteration. None: what the layout says.
        order_seconds: With the schedule ``zbv``: the times from which Colossal-AI orders the passes. None: the means of
            the chunks.
        overlap: Whether communication between pipelines overlaps with passes; only for ``1f1b``.

    Raises:
        ValueError: The layout does not fit the profile, or its micro-batches do not fit the global batch.
    """

    def __init__(
        self,
        topology: Topology,
        profile: ModelProfile,
        layout: PlanLayout,
        slots: Mapping[SlotType, Sequence[tuple[int, ...]]],
        *,
        global_batch: int | None = None,
        order_seconds: GraphSeconds | None = None,
        overlap: bool = False,
    ) -> None:
        self.topology, self.profile = topology, profile
        if layout.blocks != profile.blocks:
            layout.wrong(
                f"the layout has {layout.blocks} blocks, but {profile.name} has {profile.blocks}: the last stage must "
                f"end with block {profile.blocks - 1}",
                layout.pipelines[0].stages[-1],
            )
        if overlap and layout.schedule != "1f1b":
            raise ValueError(f"overlap is predicted for the schedule 1f1b only, not for {layout.schedule}")
        if layout.micro_batch is None:
            raise ValueError(
                "the layout does not say how large a micro-batch is; write · micro-batch 2 × 8, or give it"
            )
        self.layout = layout
        self.micro_batch = layout.micro_batch
        self.order_seconds = order_seconds
        self.total_micro_batches = self._total(global_batch)
        self._builder = DraftBuilder(topology, METHOD, overlap=overlap)
        self._pool, self._places = self._slot_pool(slots)

    def plan(self, ranks: Ranks) -> Plan:
        """The plan with these ranks, ``[pipelines][stages][ranks of a stage]``; it need not fit in memory.

        Raises:
            ValueError: Devices cannot reach each other, or the schedule cannot run the layout.
        """
        if self.layout.schedule != "1f1b":
            return self._chunked(ranks)
        plan = write_plan(self._draft(ranks), self.topology, self.profile, METHOD, ())
        replicas = []
        for replica, pipeline in zip(plan.replicas, self.layout.pipelines, strict=True):
            stages = zip(replica.stages, pipeline.stages, strict=True)
            replicas.append(
                replica.model_copy(
                    update={
                        "stages": tuple(one.model_copy(update={"recompute": each.recompute}) for one, each in stages)
                    }
                )
            )
        return plan.model_copy(update={"replicas": tuple(replicas)})

    def _total(self, global_batch: int | None) -> int:
        """Micro-batches per iteration of all pipelines."""
        counts = [each.micro_batches for each in self.layout.pipelines]
        said = [count for count in counts if count is not None]
        samples = sum(said) * self.micro_batch
        if len(said) == len(counts):
            if global_batch not in (None, samples):
                raise ValueError(
                    f"the layout has {sum(said)} micro-batches of {self.micro_batch}, which are {samples} samples, not "
                    f"a global batch of {global_batch}; leave one of both out"
                )
            return sum(said)
        if said:
            raise ValueError("some pipelines of the layout have a number of micro-batches and others do not; give all")
        if global_batch is None:
            raise ValueError(
                "the layout does not say how many micro-batches there are; write · micro-batch 2 × 8, or give the "
                "global batch"
            )
        total, left = divmod(global_batch, self.micro_batch)
        if left or total < len(counts):
            raise ValueError(
                f"a global batch of {global_batch} samples cannot be divided into micro-batches of {self.micro_batch} "
                f"for {len(counts)} pipelines; use a multiple of {self.micro_batch}, at least "
                f"{self.micro_batch * len(counts)}"
            )
        return total

    def _slot_pool(self, slots: Mapping[SlotType, Sequence[tuple[int, ...]]]) -> tuple[SlotPool, dict[object, Place]]:
        """The slots as a pool, and the place in it of ranks that recompute or do not."""
        devices, layout = self.topology.devices, self.layout
        pipelines = len(layout.pipelines) if layout.zero_stage else None
        forms = {(slot_type(stage), stage.recompute) for each in layout.pipelines for stage in each.stages}
        kinds: list[SlotKind] = []
        places: dict[object, Place] = {}
        for each, recompute in sorted(forms):
            by_speed: dict[float, list[tuple[int, ...]]] = {}
            for ranks in slots[each]:
                by_speed.setdefault(min(devices[rank].speed for rank in ranks), []).append(ranks)
            for speed, members in by_speed.items():
                costs = stage_costs(
                    self.profile,
                    each.device,
                    tensor_parallel=each.tensor_parallel,
                    micro_batch=self.micro_batch,
                    speed=speed,
                    recompute=recompute,
                    zero_shards=pipelines or 1,
                )
                usable = devices[members[0][0]].kind.usable_bytes
                places |= {(ranks, recompute): (len(kinds), slot) for slot, ranks in enumerate(members)}
                kinds.append(SlotKind(each.device, speed, usable, costs, tuple(members), each.tensor_parallel))
        message = float(np.max(kinds[0].costs.output_bytes))
        links = NodeLinks(self.topology, message)
        degree = kinds[0].tensor_parallel
        pool = SlotPool(degree, self.micro_batch, tuple(kinds), self.total_micro_batches, links, pipelines)
        return pool, places

    def _draft(self, ranks: Ranks) -> Draft:
        rows = [
            tuple(self._places[group, stage.recompute] for group, stage in zip(row, pipeline.stages, strict=True))
            for row, pipeline in zip(ranks, self.layout.pipelines, strict=True)
        ]
        bounds = [(0, *(stage.block_ranges[0][1] for stage in pipeline.stages)) for pipeline in self.layout.pipelines]

        def cut(counts: Sequence[int]) -> Draft:
            draft = self._builder.build_cut(self._pool, rows, bounds, counts, must_fit=False)
            if isinstance(draft, str):
                raise ValueError(draft)
            return draft

        counts = [each.micro_batches for each in self.layout.pipelines]
        said = [count for count in counts if count is not None]
        if said:
            return cut(said)
        number = len(rows)
        if self.layout.alike and self.total_micro_batches % number == 0:
            return cut([self.total_micro_batches // number] * number)
        one = cut([1] * number)
        fill = [cost.seconds for cost in one.costs]
        steps = [max(cost.stage_seconds) for cost in one.costs]
        minimum = self._builder.min_micro_batches(map(len, rows))
        if sum(minimum) > self.total_micro_batches:
            minimum = [1] * number
        return cut(divide_micro_batches(fill, steps, self.total_micro_batches, minimum))

    def _chunked(self, ranks: Ranks) -> Plan:
        layout = self.layout
        stages = [stage for pipeline in layout.pipelines for stage in pipeline.stages]
        forms = {(stage.tensor_parallel, stage.recompute) for stage in stages}
        if layout.zero_stage or forms != {(stages[0].tensor_parallel, False)}:
            raise ValueError(
                f"stages of the schedule {layout.schedule} have one degree and no recomputation, and ZeRO stage 0; "
                "others are priced for 1F1B only"
            )
        if not layout.alike or self.total_micro_batches % len(ranks):
            raise ValueError(f"pipelines of the schedule {layout.schedule} are all alike; write dp N × pp […]")
        ranges = sorted(itertools.chain.from_iterable(stage.block_ranges for stage in layout.pipelines[0].stages))
        return predict_chunked_plan(
            self.topology,
            self.profile,
            ranks,
            schedule=layout.schedule,
            chunks=len(layout.pipelines[0].stages[0].block_ranges),
            micro_batch=self.micro_batch,
            global_batch=self.total_micro_batches * self.micro_batch,
            bounds=(0, *(stop for _, stop in ranges)),
            order_seconds=self.order_seconds,
            method=METHOD,
        )
