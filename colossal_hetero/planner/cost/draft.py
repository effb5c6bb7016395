"""Builds one candidate of the search: places the slots, splits the model, divides the micro-batches, predicts times."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..cluster.topology import Channel, Topology
from ..profile.layer_costs import combined
from ..profile.layer_profile import ModelProfile
from ..stages.pipeline import PipelineCost, Slot, evaluate
from ..stages.split_methods import split
from .gradient_times import GradientTimes, Summing, divide_micro_batches, even_end
from .placement import Place, SlotPool, place, place_together
from .plan import Plan, Replica, StagePlan, exposed_seconds
from .ranked_plan import ranking_seconds

NO_LINK = Channel("none", 1e-6)
"""Between nodes that cannot reach each other. A draft in which stages send over it is rejected."""

Kinds = tuple[tuple[int, ...], ...]
"""Kind of each slot of a pipeline. If several pipelines are cut alike: the kinds that it has in any of them."""
Hops = tuple[int, ...]
"""Numbers of the channels between neighboring slots of a pipeline; −1 where there is no link."""
Rows = Sequence[Sequence[Place]]
"""Slots of each pipeline, in the order of its stages."""


@dataclass(frozen=True, eq=False)
class Draft:
    """A complete candidate of the search; lists have one entry per pipeline. :func:`write_plan` makes it a plan."""

    pool: SlotPool
    rows: list[list[Place]]
    bounds: list[tuple[int, ...]]  # stage s of pipeline p runs blocks ``[bounds[p][s], bounds[p][s + 1])``
    micro_batches: list[int]
    costs: list[PipelineCost]
    synchronization_seconds: float
    """Sums of gradients over the pipelines, per iteration; with overlap only what no pass hides."""

    @property
    def used(self) -> tuple[int, ...]:
        kinds = [kind for row in self.rows for kind, _ in row]
        return tuple(np.bincount(kinds, minlength=len(self.pool.kinds)).tolist())

    @cached_property
    def is_equal(self) -> bool:
        """True if all pipelines are cut alike and run equally many micro-batches."""
        return len(set(self.bounds)) == 1 and len(set(self.micro_batches)) == 1

    @property
    def devices(self) -> int:
        return sum(map(len, self.rows)) * self.pool.tensor_parallel

    @property
    def pipeline_seconds(self) -> float:
        return max(cost.seconds for cost in self.costs)

    @cached_property
    def seconds(self) -> float:
        return self.pipeline_seconds + self.synchronization_seconds

    @cached_property
    def even_seconds(self) -> float:
        """:attr:`ranking_seconds` if micro-batches could be divided, for pipelines that differ."""
        steps = np.maximum([max(cost.stage_seconds) for cost in self.costs], 1e-15)
        more = np.array(self.micro_batches) - list(map(len, self.rows))
        ends = np.array([cost.seconds for cost in self.costs]) - more * steps
        even = max(even_end(ends, steps, int(more.sum())), float(ends.max()))
        return (even + self.synchronization_seconds) * self.ranking_seconds / self.seconds

    @cached_property
    def ranking_seconds(self) -> float:
        plain = self.pool.pipelines is None and not any(any(cost.recompute) for cost in self.costs)
        return ranking_seconds(self.seconds, equal=self.is_equal, plain=plain)


class DraftBuilder:
    """Builds drafts. Splits and costs of pipelines are computed once: among the thousands of candidates of a search,
    few pipelines differ in what matters, the kinds of their slots and the channels between neighboring stages."""

    def __init__(self, topology: Topology, method: str, *, overlap: bool = False) -> None:
        self.topology = topology
        self.method = method
        self.overlap = overlap
        self.chooses_cuts = method == "exact"
        """True if the method looks for the fastest cuts by the formula, so that all cuts may be compared."""
        self._node_of = [device.node for device in topology.devices]
        self._cluster_of = [node.cluster for node in topology.nodes]
        self._gradients = GradientTimes(topology)
        self._cuts: dict[object, tuple[float, tuple[int, ...] | str]] = {}
        """Bounds, and the seconds below which they were looked for."""
        self._costs: dict[object, PipelineCost] = {}
        self._slots: dict[object, Slot] = {}
        self._last_hops: tuple[object, list[Hops]] = (None, [])

    def build(self, pool: SlotPool, groups: Sequence[Sequence[int]], *, symmetric: bool = False) -> Draft | str:
        """The draft with these numbers of slots, ``[pipelines][kinds]``, or in words why there is none."""
        drafts: dict[object, Draft | str] = {}
        for placed in (place, place_together):
            places = placed(groups, [kind.slots for kind in pool.kinds], self._node_of, self._cluster_of)
            look = tuple(sorted(tuple((kind, self.node(pool, (kind, slot))) for kind, slot in each) for each in places))
            if look not in drafts:
                drafts[look] = self.build_placed(pool, places, symmetric=symmetric)
        found = [draft for draft in drafts.values() if isinstance(draft, Draft)]
        return min(found, key=lambda draft: draft.seconds) if found else next(iter(drafts.values()))

    def build_placed(
        self,
        pool: SlotPool,
        rows: Rows,
        *,
        symmetric: bool = False,
        in_order: bool = False,
        below: float = np.inf,
        sums: float = 0.0,
    ) -> Draft | str:
        """The draft with these slots, or in words why there is none that takes less than ``below`` seconds, of which
        sums of gradients take at least ``sums``. If ``symmetric``, all pipelines are cut alike; if ``in_order``, stages
        have no other order, even if that fits."""
        total = pool.total_micro_batches
        minimum = list(map(len, rows))
        if symmetric:
            counts = [total // len(rows)] * len(rows)
        elif sum(minimum) > total:
            return f"{total} micro-batches are too few for the stages of all replicas"
        else:
            counts = [max(each, round(total / len(rows))) for each in minimum]
        below_split = below - sums if symmetric else np.inf
        bounds = self._split(pool, rows, counts, symmetric, below_split)
        if isinstance(bounds, str) and self.chooses_cuts and not in_order:
            # Blocks fit into other orders of the stages: by speed and by memory, both ways.
            fitting = []
            rules = [kind.model_seconds for kind in pool.kinds], [kind.memory_bytes for kind in pool.kinds]
            for values, sign in itertools.product(rules, (1, -1)):
                value_of = {place: sign * values[place[0]] for row in rows for place in row}
                arranged = [sorted(row, key=value_of.__getitem__) for row in rows]
                found = self._split(pool, arranged, counts, symmetric, below_split)
                if not isinstance(found, str):
                    costs = self._price(pool, arranged, found, counts)
                    fitting.append((max(cost.seconds for cost in costs), arranged, found))
            if fitting:
                _, rows, bounds = min(fitting, key=lambda each: each[0])
        if isinstance(bounds, str):
            return bounds
        costs = self._price(pool, rows, bounds, counts)
        if not symmetric:
            steps = [max(cost.stage_seconds) for cost in costs]
            fill = [cost.seconds - (count - 1) * step for cost, count, step in zip(costs, counts, steps, strict=True)]
            divided = divide_micro_batches(fill, steps, total, minimum)
            # With more micro-batches than a split was made for, more memory may be needed.
            again = self._price(pool, rows, bounds, divided)
            if all(cost.fits for cost in again):
                counts, costs = divided, again
            elif all(cost.fits for cost in costs) and sum(counts) != total:
                return "a stage has too little memory for its micro-batches in flight"
        if not max(cost.seconds for cost in costs) < below - sums:
            return "a pipeline takes too long"
        return self._draft(pool, rows, bounds, counts, costs, below)

    def build_cut(
        self,
        pool: SlotPool,
        rows: Rows,
        bounds: Sequence[tuple[int, ...]],
        micro_batches: Sequence[int],
        below: float = np.inf,
        *,
        sums: float = 0.0,
        must_fit: bool = True,
    ) -> Draft | str:
        """The draft in which nothing is left to choose, or in words why there is none; see :meth:`build_placed`."""
        costs = self._price(pool, rows, bounds, micro_batches, below - sums)
        if not costs[-1].seconds < below - sums:
            return "a pipeline takes too long"
        return self._draft(pool, rows, bounds, micro_batches, costs, below, must_fit=must_fit)

    def _draft(
        self,
        pool: SlotPool,
        rows: Rows,
        bounds: Sequence[tuple[int, ...]],
        counts: Sequence[int],
        costs: list[PipelineCost],
        below: float,
        *,
        must_fit: bool = True,
    ) -> Draft | str:
        if must_fit and not all(cost.fits for cost in costs):
            return f"the split by {self.method} does not fit into memory"
        if any(max(cost.transfer_seconds) >= 1.0 / NO_LINK.bytes_per_second for cost in costs):
            return "consecutive stages have no link"
        left = np.inf if self.overlap else below - max(cost.seconds for cost in costs)
        try:
            synchronization = self.summing(pool, rows).seconds(bounds, left)
        except ValueError as error:
            return str(error)
        if not synchronization < left:
            return "sums of gradients take too long"
        if self.overlap:
            passes = [each for cost in costs for each in zip(cost.forward_seconds, cost.backward_seconds, strict=True)]
            equal = len(set(bounds)) == 1 and len(set(counts)) == 1
            synchronization = exposed_seconds(synchronization, passes, equal=equal)
        return Draft(pool, list(map(list, rows)), list(bounds), list(counts), costs, synchronization)

    def _split(
        self, pool: SlotPool, rows: Rows, counts: Sequence[int], symmetric: bool, below: float
    ) -> list[tuple[int, ...]] | str:
        """The bounds of each pipeline, or in words why there are none. If pipelines are cut alike, they are those for
        the slowest link between two stages and the slowest slot of each."""
        kinds, hops = [_kinds(row) for row in rows], self.hops(pool, rows)
        if symmetric:
            if len(set(kinds)) > 1:
                kinds = [tuple(tuple(sorted(set().union(*stage))) for stage in zip(*kinds, strict=True))]
            if len(set(hops)) > 1:
                hops = [tuple(pool.links.slowest(np.array(hops), axis=0).tolist())]
            kinds = kinds[:1]
        bounds: list[tuple[int, ...]] = []
        for each, own_hops, count in zip(kinds, hops, counts, strict=False):
            cut = self._cut(pool, each, own_hops, count, below)
            if isinstance(cut, str):
                return cut
            bounds.append(cut)
        return bounds * len(rows) if symmetric else bounds

    def _cut(self, pool: SlotPool, kinds: Kinds, hops: Hops, micro_batches: int, below: float) -> tuple[int, ...] | str:
        key = (pool, kinds, hops, micro_batches)
        tried, found = self._cuts.get(key, (-np.inf, ""))
        if isinstance(found, str) and tried < below:
            slots = [self.slot(pool, each, len(kinds)) for each in kinds]
            try:
                found = split(slots, _channels(pool, hops), micro_batches, self.method, below=below)
            except ValueError as error:
                found = str(error)
            self._cuts[key] = below, found
        return found

    def _price(
        self,
        pool: SlotPool,
        rows: Rows,
        bounds: Sequence[tuple[int, ...]],
        counts: Sequence[int],
        below: float = np.inf,
    ) -> list[PipelineCost]:
        """Costs of the pipelines, up to the first one that does not take less than ``below``."""
        costs: list[PipelineCost] = []
        for row, hops, cut, count in zip(rows, self.hops(pool, rows), bounds, counts, strict=True):
            kinds = _kinds(row)
            key = (pool, kinds, hops, count, cut)
            if key not in self._costs:
                slots = [self.slot(pool, each, len(kinds)) for each in kinds]
                self._costs[key] = evaluate(slots, _channels(pool, hops), count, cut)
            costs.append(self._costs[key])
            if not costs[-1].seconds < below:
                break
        return costs

    def summing(self, pool: SlotPool, rows: Rows) -> Summing:
        groups = [[pool.kinds[kind].slots[slot] for kind, slot in row] for row in rows]
        return Summing(self._gradients, pool.links.node_kind, groups, pool.kinds[0].costs.gradient_bytes)

    def hops(self, pool: SlotPool, rows: Rows) -> list[Hops]:
        """The channels between neighboring slots of each pipeline, which share NICs with the other pipelines."""
        key = pool, tuple(map(tuple, rows))
        if self._last_hops[0] != key:
            node_of, kinds = self._node_of, pool.kinds
            nodes = [[node_of[kinds[kind].slots[slot][0]] for kind, slot in row] for row in rows]
            self._last_hops = key, [tuple(row) for row in pool.links.hops(nodes, pool.tensor_parallel)]
        return self._last_hops[1]

    def node(self, pool: SlotPool, place: Place) -> int:
        kind, slot = place
        return self._node_of[pool.kinds[kind].slots[slot][0]]

    def slot(self, pool: SlotPool, kinds: tuple[int, ...], stages: int) -> Slot:
        """A slot that takes as long and needs as much memory, per block, as the worst of these kinds."""
        key = (pool, kinds, stages == 1)
        if key not in self._slots:
            several = [pool.kinds[kind] for kind in kinds]
            name = " or ".join(dict.fromkeys(kind.device for kind in several))
            again = [form for kind in several if (form := kind.recomputed_in_pipeline(stages)) is not None]
            self._slots[key] = Slot(
                name,
                combined([kind.costs for kind in several], np.max),
                min(kind.memory_in_pipeline(stages) for kind in several),
                (combined([each for each, _ in again], np.max), min(each for _, each in again)) if again else None,
                min((kind.training_speed for kind in several if kind.training_speed is not None), default=None),
            )
        return self._slots[key]


def _kinds(row: Sequence[Place]) -> Kinds:
    return tuple([(kind,) for kind, _ in row])


def _channels(pool: SlotPool, numbers: Sequence[int]) -> list[Channel]:
    return [pool.links.channels[number] if number >= 0 else NO_LINK for number in numbers]


def write_plan(draft: Draft, topology: Topology, profile: ModelProfile, method: str) -> Plan:
    pool = draft.pool
    return finished_plan(
        profile,
        [_replica(draft, number, topology) for number in range(len(draft.costs))],
        draft.synchronization_seconds,
        pool.micro_batch,
        method=method,
        tensor_parallel=pool.tensor_parallel,
        zero_stage=0 if pool.pipelines is None else 1,
    )


def _replica(draft: Draft, number: int, topology: Topology) -> Replica:
    cost, bounds, row = draft.costs[number], draft.bounds[number], draft.rows[number]
    stages = []
    for stage, (kind, index) in enumerate(row):
        slots = draft.pool.kinds[kind]
        block_bytes = slots.memory_in_pipeline(len(row))
        again = bool(cost.recompute) and cost.recompute[stage]
        if again and (form := slots.recomputed_in_pipeline(len(row))) is not None:
            block_bytes = form[1]
        stages.append(
            planned_stage(
                topology,
                slots.slots[index],
                cost.memory_bytes[stage],
                block_bytes,
                blocks=(bounds[stage], bounds[stage + 1]),
                recompute=again,
                forward_seconds=cost.forward_seconds[stage],
                backward_seconds=cost.backward_seconds[stage],
                transfer_seconds=cost.transfer_seconds[stage],
                update_seconds=cost.update_seconds[stage],
            )
        )
    return Replica(stages=tuple(stages), micro_batches=draft.micro_batches[number], pipeline_seconds=cost.seconds)


def planned_stage(
    topology: Topology, ranks: Sequence[int], memory_bytes: float, available_bytes: float, **values: Any
) -> StagePlan:
    """The stage of these ranks, whose blocks need ``memory_bytes`` of the ``available_bytes`` that a device has for
    blocks."""
    device = topology.devices[ranks[0]]
    overhead = device.kind.memory_bytes - available_bytes
    return StagePlan(
        device=device.kind.name,
        ranks=tuple(ranks),
        node=topology.nodes[device.node].name,
        memory_bytes=memory_bytes + overhead,
        memory_overhead_bytes=overhead,
        memory_available_bytes=device.kind.memory_bytes,
        **values,
    )


def finished_plan(
    profile: ModelProfile, replicas: Sequence[Replica], synchronization_seconds: float, micro_batch: int, **values: Any
) -> Plan:
    """The plan of these replicas. Its iteration takes as long as the slowest pipeline and the synchronization."""
    return Plan(
        model=profile.name,
        precision=profile.precision,
        blocks=profile.blocks,
        micro_batch=micro_batch,
        global_batch=micro_batch * sum(replica.micro_batches for replica in replicas),
        replicas=tuple(replicas),
        synchronization_seconds=synchronization_seconds,
        iteration_seconds=max(replica.pipeline_seconds for replica in replicas) + synchronization_seconds,
        **values,
    )
