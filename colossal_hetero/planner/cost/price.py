"""The price of a plan: the time of an iteration and the memory of devices, for given ranks, blocks and micro-batches.

Search, evaluation, planning again and reports ask here what a layout takes.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches

import numpy as np

from ...common.text import count
from ..cluster.topology import Topology
from ..profile.layer_profile import ModelProfile
from ..stages.split_methods import uniform_bounds
from .chunked_price import Ranks, equal_micro_batches, kind_of_group, price_chunks
from .draft import Draft, DraftBuilder, write_plan
from .gradient_times import divide_micro_batches
from .layout_line import PipelineLayout, PlanLayout, StageLayout
from .pass_order import GraphSeconds
from .placement import NodeLinks, Place, SlotPool, place, place_together
from .plan import Plan
from .tp_groups import SlotKind, tensor_parallel_groups

METHOD = "given"  # method of plans whose stages nobody looked for

Slots = Mapping[str, Sequence[tuple[int, ...]]]
"""Ranks of each tensor-parallel group, by kind of device."""


def price(
    topology: Topology,
    profile: ModelProfile,
    layout: PlanLayout,
    ranks: Ranks,
    *,
    order_seconds: GraphSeconds | None = None,
    overlap: bool = False,
    method: str = METHOD,
) -> Plan:
    """The plan of a layout with these ranks, ``[pipelines][stages][ranks of a stage]``; it need not fit in memory. The
    passes of ``zbv`` are ordered from ``order_seconds``, by default from mean times; ``overlap`` is for 1F1B only, and
    ``method`` is the name of what chose the cuts."""
    slots = slots_of(topology, ranks, layout.tensor_parallel)
    pricer = Pricer(topology, profile, layout, slots, order_seconds=order_seconds, overlap=overlap)
    return pricer.plan(tuple(tuple(map(tuple, row)) for row in ranks)).model_copy(update={"method": method})


def price_ranks(
    topology: Topology,
    profile: ModelProfile,
    ranks: Sequence[Sequence[Sequence[int]]],
    bounds: Sequence[int] | None = None,
    *,
    micro_batch: int,
    global_batch: int,
    overlap: bool = False,
    method: str = METHOD,
) -> Plan:
    """The 1F1B plan of equal replicas with these ranks and bounds of stages, by default those of equal stages."""
    steps = equal_micro_batches(global_batch, micro_batch, len(ranks))
    cut = list(itertools.pairwise(uniform_bounds(profile.blocks, len(ranks[0])) if bounds is None else bounds))
    pipelines = []
    for row in ranks:
        kinds = [topology.devices[group[0]].kind.name for group in row]
        stages = tuple(StageLayout(kind, (blocks,)) for kind, blocks in zip(kinds, cut, strict=True))
        pipelines.append(PipelineLayout(stages, steps))
    layout = PlanLayout(tuple(pipelines), micro_batch, tensor_parallel=len(ranks[0][0]))
    given = tuple(tuple(map(tuple, row)) for row in ranks)
    return price(topology, profile, layout, given, overlap=overlap, method=method)


class Pricer:
    """Prices of one layout with any ranks of these slots; what several of them share is computed once."""

    def __init__(
        self,
        topology: Topology,
        profile: ModelProfile,
        layout: PlanLayout,
        slots: Slots,
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
            raise ValueError("the layout does not say how large a micro-batch is; write · micro-batch 2 × 8")
        self.layout = layout
        self.micro_batch = layout.micro_batch
        self.order_seconds = order_seconds
        self.total_micro_batches = self._total(global_batch)
        self._builder = DraftBuilder(topology, METHOD, overlap=overlap)
        self.pool, self._places = self._slot_pool(slots)

    def plan(self, ranks: Ranks) -> Plan:
        if self.layout.schedule != "1f1b":
            return self._chunked(ranks)
        plan = write_plan(self._draft(ranks), self.topology, self.profile, METHOD)
        replicas = []
        for replica, pipeline in zip(plan.replicas, self.layout.pipelines, strict=True):
            stages = zip(replica.stages, pipeline.stages, strict=True)
            again = tuple(one.model_copy(update={"recompute": each.recompute}) for one, each in stages)
            replicas.append(replica.model_copy(update={"stages": again}))
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

    def _slot_pool(self, slots: Slots) -> tuple[SlotPool, dict[object, Place]]:
        """The slots as a pool, and the place in it of ranks that recompute or do not."""
        devices, layout = self.topology.devices, self.layout
        shards = len(layout.pipelines) if layout.zero_stage else None
        forms = {(stage.device, stage.recompute) for each in layout.pipelines for stage in each.stages}
        kinds: list[SlotKind] = []
        places: dict[object, Place] = {}
        for device, recompute in sorted(forms):
            by_speed: dict[float, list[tuple[int, ...]]] = {}
            for ranks in slots[device]:
                by_speed.setdefault(min(devices[rank].speed for rank in ranks), []).append(ranks)
            for speed, members in by_speed.items():
                form = (device, layout.tensor_parallel, self.micro_batch, speed)
                costs = self.profile.costs(*form, recompute=recompute, zero_shards=shards or 1)
                usable = devices[members[0][0]].kind.usable_bytes
                places |= {(ranks, recompute): (len(kinds), slot) for slot, ranks in enumerate(members)}
                kinds.append(SlotKind(device, speed, usable, costs, tuple(members)))
        links = NodeLinks(self.topology, float(np.max(kinds[0].costs.output_bytes)))
        pool = SlotPool(layout.tensor_parallel, self.micro_batch, tuple(kinds), self.total_micro_batches, links, shards)
        return pool, places

    def rows(self, ranks: Ranks) -> tuple[tuple[Place, ...], ...]:
        """The slots in :attr:`pool` of the ranks of each pipeline."""
        return tuple(
            tuple(
                self._places[tuple(group), stage.recompute] for group, stage in zip(row, pipeline.stages, strict=True)
            )
            for row, pipeline in zip(ranks, self.layout.pipelines, strict=True)
        )

    def _draft(self, ranks: Ranks) -> Draft:
        rows = self.rows(ranks)
        bounds = [(0, *(stage.block_ranges[0][1] for stage in pipeline.stages)) for pipeline in self.layout.pipelines]

        def cut(counts: Sequence[int]) -> Draft:
            draft = self._builder.build_cut(self.pool, rows, bounds, counts, must_fit=False)
            if isinstance(draft, str):
                raise ValueError(draft)
            return draft

        said = [each.micro_batches for each in self.layout.pipelines if each.micro_batches is not None]
        if said:
            return cut(said)
        number = len(rows)
        if self.layout.alike and self.total_micro_batches % number == 0:
            return cut([self.total_micro_batches // number] * number)
        one = cut([1] * number)
        fill = [cost.seconds for cost in one.costs]
        steps = [max(cost.stage_seconds) for cost in one.costs]
        minimum = list(map(len, rows))
        if sum(minimum) > self.total_micro_batches:
            minimum = [1] * number
        return cut(divide_micro_batches(fill, steps, self.total_micro_batches, minimum))

    def _chunked(self, ranks: Ranks) -> Plan:
        layout = self.layout
        stages = [stage for pipeline in layout.pipelines for stage in pipeline.stages]
        if layout.zero_stage or any(stage.recompute for stage in stages):
            raise ValueError(
                f"stages of the schedule {layout.schedule} have no recomputation, and ZeRO stage 0; others are priced "
                "for 1F1B only"
            )
        if not layout.alike or self.total_micro_batches % len(ranks):
            raise ValueError(f"pipelines of the schedule {layout.schedule} are all alike; write dp N × pp […]")
        ranges = sorted(itertools.chain.from_iterable(stage.block_ranges for stage in layout.pipelines[0].stages))
        return price_chunks(
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


def slots_of(topology: Topology, ranks: Ranks, degree: int) -> dict[str, list[tuple[int, ...]]]:
    """The groups in ``ranks``, by kind of device."""
    slots: dict[str, list[tuple[int, ...]]] = {}
    for group in itertools.chain.from_iterable(ranks):
        slots.setdefault(kind_of_group(topology, group, degree), []).append(tuple(group))
    return slots


def available_slots(topology: Topology, layout: PlanLayout) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The tensor-parallel groups of each kind of the layout: devices of similar speed in one node."""
    degree = layout.tensor_parallel
    stages = [stage for each in layout.pipelines for stage in each.stages]
    first = {stage.device: stage for stage in reversed(stages)}
    needed = Counter(stage.device for stage in stages)
    kinds = Counter(device.kind.name for device in topology.devices)
    every = tensor_parallel_groups(topology, degree)
    slots: dict[str, tuple[tuple[int, ...], ...]] = {}
    for device in first:
        if device not in kinds:
            close = get_close_matches(device, kinds, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            layout.wrong(f"the cluster has no {device}; it has {', '.join(kinds)}{hint}", first[device])
        missing = needed[device] * degree - kinds[device]
        if missing > 0:
            layout.wrong(
                f"the layout needs {needed[device] * degree:,} × {device}, but the cluster has {kinds[device]:,}; "
                f"{missing:,} are missing",
                first[device],
            )
        # By node, the fastest first.
        by_speed = [(-speed, group) for (kind, speed, _), each in every.items() if kind == device for group in each]
        by_speed.sort(key=lambda each: (topology.devices[each[1][0]].node, each[0]))
        groups = [group for _, group in by_speed]
        if len(groups) < needed[device]:
            layout.wrong(
                f"the layout needs {count(needed[device], 'group')} of {degree} × {device}, each inside a node, but "
                f"the nodes of the cluster have only {len(groups)}",
                first[device],
            )
        slots[device] = tuple(groups)
    return slots


def first_places(topology: Topology, slots: Slots, layout: PlanLayout) -> Iterator[Ranks]:
    """Ranks as the planner places these slots, ``[pipelines][stages]``: slots of all, or only those with the fastest
    networks or devices. They are also given out in this order, to one pipeline after the other."""
    node_of = [device.node for device in topology.devices]
    cluster_of = [node.cluster for node in topology.nodes]
    kinds = list(slots)
    wanted = [[kinds.index(stage.device) for stage in pipeline.stages] for pipeline in layout.pipelines]
    groups = [[row.count(each) for each in range(len(kinds))] for row in wanted]
    needed = [sum(numbers) for numbers in zip(*groups, strict=True)]

    def network(ranks: tuple[int, ...]) -> float:
        return -max((nic.bytes_per_second for nic in topology.nodes[node_of[ranks[0]]].nics), default=0.0)

    def slowness(ranks: tuple[int, ...]) -> float:
        return -min(topology.devices[rank].speed for rank in ranks)

    def best(*rules: Callable[[tuple[int, ...]], float]) -> list[Sequence[tuple[int, ...]]]:
        ordered = [sorted(each, key=lambda ranks: [rule(ranks) for rule in rules]) for each in slots.values()]
        return [ranks[:number] for ranks, number in zip(ordered, needed, strict=True)]

    for available in (list(slots.values()), best(network, slowness), best(slowness, network)):
        for placed in (place, place_together):
            yield _rows(wanted, available, placed(groups, available, node_of, cluster_of))
        in_turn = [iter(range(len(each))) for each in available]
        yield _rows(wanted, available, [[(kind, next(in_turn[kind])) for kind in row] for row in wanted])


def _rows(
    wanted: Sequence[Sequence[int]],
    available: Sequence[Sequence[tuple[int, ...]]],
    placed: Sequence[Sequence[tuple[int, int]]],
) -> Ranks:
    """The slots of each pipeline in the order of its stages, of which ``wanted`` says the kinds."""
    rows = []
    for row, places in zip(wanted, placed, strict=True):
        of_kind = {each: iter([slot for kind, slot in places if kind == each]) for each in set(row)}
        rows.append(tuple(available[each][next(of_kind[each])] for each in row))
    return tuple(rows)


def exchanged_places(ranks: Ranks, slots: Slots, slowest: int) -> Iterator[Ranks]:
    """The ranks after each exchange of two slots of one kind, those of the pipeline ``slowest`` first."""
    kind_of = {group: each for each, of_kind in slots.items() for group in of_kind}
    used = [group for row in (ranks[slowest], *ranks[:slowest], *ranks[slowest + 1 :]) for group in row]
    free = sorted(kind_of.keys() - set(used))
    for one, other in itertools.chain(itertools.combinations(used, 2), itertools.product(used, free)):
        if kind_of[one] == kind_of[other]:
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
            of_node = node.cluster, node.inside, node.inside_bytes_per_second, node.nics
            looks.append((first.kind, len(group), speed, number, of_node))
        pipelines.append(tuple(looks))
    return tuple(pipelines)
