"""The plan of a layout whose ranks are given, with its predicted times and memory."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

import numpy as np

from ...common.text import count
from ..cluster.topology import Topology
from ..profile.layer_profile import ModelProfile
from ..profile.stage_costs import stage_costs
from .draft import Draft, DraftBuilder, write_plan
from .gradient_times import divide_micro_batches
from .layout_line import PlanLayout, StageLayout
from .pass_order import GraphSeconds
from .placement import NodeLinks, Place, SlotPool, place, place_together
from .plan import Plan
from .predict_chunked import Ranks, predict_chunked_plan
from .tp_groups import SlotKind

__all__ = [
    "LayoutPricer",
    "SlotType",
    "TypeSlots",
    "available_slots",
    "exchanged_places",
    "first_places",
    "look",
    "slot_type",
]


# Layout slots --------------------------------------------------------------------------------------------------------


class SlotType(NamedTuple):
    """Kind of device and devices per slot of slots that can run the same stages."""

    device: str
    tensor_parallel: int


class TypeSlots(NamedTuple):
    """Kind of device of the slots of one type, and the ranks of each."""

    device: str
    slots: tuple[tuple[int, ...], ...]


def slot_type(stage: StageLayout) -> SlotType:
    return SlotType(stage.device, stage.tensor_parallel)


def available_slots(topology: Topology, layout: PlanLayout) -> dict[SlotType, TypeSlots]:
    """The slots of each type of the layout: devices of similar speed in one node. Of several degrees of a kind, the
    largest gets as many slots as it needs, from nodes with the fewest devices left over, and the smallest the rest."""
    stages = [stage for each in layout.pipelines for stage in each.stages]
    first = {slot_type(stage): stage for stage in reversed(stages)}
    needed = Counter(map(slot_type, stages))
    kinds = Counter(device.kind.name for device in topology.devices)
    slots: dict[SlotType, TypeSlots] = {}
    for device in dict.fromkeys(each.device for each in first):
        own = [each for each in first if each.device == device]
        _check_devices(
            layout, kinds, sum(stage.tensor_parallel for stage in stages if stage.device == device), first[own[0]]
        )
        free = _by_node(topology, device)
        own = sorted(own, key=lambda each: -each.tensor_parallel)
        for each in own:
            degree, wanted = each.tensor_parallel, needed[each]
            groups = _groups(free, degree, None if each is own[-1] else wanted)
            if len(groups) < wanted:
                layout.wrong(
                    f"the layout needs {count(wanted, 'group')} of {degree} × {device}, each inside a node, but the "
                    f"nodes of the cluster have only {len(groups)}",
                    first[each],
                )
            slots[each] = TypeSlots(device, groups)
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


def _groups(free: dict[int, list[int]], degree: int, wanted: int | None) -> tuple[tuple[int, ...], ...]:
    """Takes ``wanted`` groups of devices in one node out of ``free``, or all that there are, in the order of nodes."""
    groups: dict[int, list[tuple[int, ...]]] = {}
    left = wanted
    for node in sorted(free, key=lambda node: (0 if wanted is None else len(free[node]) % degree, node)):
        number = len(free[node]) // degree
        if left is not None:
            number = min(number, left)
            left -= number
        groups[node] = [tuple(sorted(free[node][start * degree : (start + 1) * degree])) for start in range(number)]
        free[node] = free[node][number * degree :]
    return tuple(group for node in sorted(groups) for group in groups[node])


METHOD = "given"
"""Method of plans whose stages nobody looked for."""


class LayoutPricer:
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
        """The plan with these ranks, ``[pipelines][stages][ranks of a stage]``; it need not fit in memory."""
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


# Layout places -------------------------------------------------------------------------------------------------------


Slots = Mapping[SlotType, TypeSlots]


def first_places(topology: Topology, slots: Slots, layout: PlanLayout) -> Iterator[Ranks]:
    """Ranks as the planner places slots of these types, ``[pipelines][stages]``: slots of all, or only those with the
    fastest networks or devices. They are also given out in this order, to one pipeline after the other."""
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
    """Key that is equal only for ranks that take equally long, on devices and nodes that are alike. Nodes are numbered
    as they come up, so ranks that take equally long can have different keys."""
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
