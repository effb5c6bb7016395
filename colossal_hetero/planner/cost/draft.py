"""Builds one candidate of the search: places the slots, splits the model, divides the micro-batches, predicts times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Topology
from ..profile.layer_profile import ModelProfile
from ..stages.pipeline import PipelineCost, Slot, Split
from .gradient_times import GradientTimes, Summing, divide_micro_batches
from .pass_order import GraphSeconds, Schedule
from .pipeline_prices import NO_LINK, Hops, Kinds, PipelinePrices
from .placement import Place, SlotPool, place, place_together
from .plan import Plan, Replica, StagePlan, exposed_seconds
from .ranked_plan import ranking_seconds

__all__ = ["Draft", "DraftBuilder", "finished_plan", "write_plan"]


@dataclass(frozen=True, eq=False)
class Draft:
    """A complete candidate of the search; lists have one entry per pipeline. :func:`write_plan` makes it a plan."""

    pool: SlotPool
    groups: list[tuple[int, ...]]
    """Number of slots of each kind, ``[pipelines][kinds]``."""
    places: list[list[Place]]
    """``[pipelines][slots]``; ``splits[p].order`` says which of them runs which stage."""
    splits: list[Split]
    micro_batches: list[int]
    costs: list[PipelineCost]
    synchronization_seconds: float
    """Sums of gradients over the pipelines, per iteration; with overlap only what no pass hides."""

    @property
    def rows(self) -> list[list[Place]]:
        """The slots of each pipeline in the order of the stages."""
        return _in_order(self.places, self.splits)

    @property
    def is_equal(self) -> bool:
        """True if all pipelines are cut alike and run equally many micro-batches."""
        return len({cut.bounds for cut in self.splits}) == 1 and len(set(self.micro_batches)) == 1

    @property
    def is_plain(self) -> bool:
        """True without ZeRO stage 1 and recomputation."""
        return self.pool.pipelines is None and not any(any(cost.recompute) for cost in self.costs)

    @property
    def devices(self) -> int:
        return sum(map(len, self.places)) * self.pool.tensor_parallel

    @property
    def pipeline_seconds(self) -> float:
        """Time of the slowest pipeline, without synchronization."""
        return max(cost.seconds for cost in self.costs)

    @property
    def seconds(self) -> float:
        return self.pipeline_seconds + self.synchronization_seconds

    @property
    def ranking_seconds(self) -> float:
        """Seconds by which drafts are compared, see :func:`.ranking_seconds`."""
        return ranking_seconds(self.seconds, equal=self.is_equal, plain=self.is_plain)


class DraftBuilder:
    """Builds drafts. Results for slots that are alike are computed once and then looked up."""

    def __init__(self, topology: Topology, method: str, *, overlap: bool = False) -> None:
        self.topology = topology
        self.method = method
        self.overlap = overlap
        self._node_of = [device.node for device in topology.devices]
        self._cluster_of = [node.cluster for node in topology.nodes]
        self._prices = PipelinePrices(method)
        self._gradients = GradientTimes(topology)

    @property
    def chooses_cuts(self) -> bool:
        """True if the method looks for the fastest cuts by the closed form, so that all cuts may be compared."""
        return self.method == "exact"

    def build(self, pool: SlotPool, groups: Sequence[Sequence[int]], *, symmetric: bool = False) -> Draft | str:
        """The draft with these groups, or in words why there is none."""
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
        places: Sequence[Sequence[Place]],
        *,
        symmetric: bool = False,
        in_order: bool = False,
    ) -> Draft | str:
        """The draft with these slots, or in words why there is none; further arguments as in :meth:`build`."""
        nodes = [[self.node(pool, place) for place in pipeline] for pipeline in places]
        sequences: list[Kinds] = [tuple((kind,) for kind, _ in pipeline) for pipeline in places]
        total = pool.total_micro_batches
        minimum = list(map(len, places))
        if symmetric:
            counts = [total // len(places)] * len(places)
        elif sum(minimum) > total:
            return f"{total} micro-batches are too few for the stages of all replicas"
        else:
            counts = [max(each, round(total / len(places))) for each in minimum]
        while True:
            splits = self._splits(pool, nodes, sequences, counts, symmetric, in_order)
            if isinstance(splits, str):
                return splits
            priced = self._priced(pool, nodes, sequences, splits)
            costs = priced(counts)
            if symmetric:
                break
            steps = [max(cost.stage_seconds) for cost in costs]
            fill = [cost.seconds - (count - 1) * step for cost, count, step in zip(costs, counts, steps, strict=True)]
            divided_counts = divide_micro_batches(fill, steps, total, minimum)
            # With more micro-batches than a split was made for, more memory may be needed. Then split again for more.
            again = priced(divided_counts)
            if all(cost.fits for cost in again):
                counts, costs = divided_counts, again
                break
            if all(count >= len(sequence) for count, sequence in zip(counts, sequences, strict=True)):
                break
            counts = [max(count, len(sequence)) for count, sequence in zip(counts, sequences, strict=True)]
        if not symmetric and all(cost.fits for cost in costs) and sum(counts) != total:
            return "a stage has too little memory for its micro-batches in flight"
        return self._draft(pool, places, splits, counts, costs)

    def build_cut(
        self,
        pool: SlotPool,
        rows: Sequence[Sequence[Place]],
        bounds: Sequence[tuple[int, ...]],
        micro_batches: Sequence[int],
        below: float = np.inf,
        *,
        must_fit: bool = True,
    ) -> Draft | str:
        """The draft in which nothing is left to choose, or in words why there is none."""
        nodes = [[self.node(pool, place) for place in row] for row in rows]
        sequences: list[Kinds] = [tuple((kind,) for kind, _ in row) for row in rows]
        splits = [Split(tuple(range(len(row))), cut) for row, cut in zip(rows, bounds, strict=True)]
        costs = self._priced(pool, nodes, sequences, splits)(micro_batches, below)
        if not costs[-1].seconds < below:
            return "a pipeline takes too long"
        return self._draft(pool, rows, splits, micro_batches, costs, must_fit=must_fit)

    def _splits(
        self,
        pool: SlotPool,
        nodes: Sequence[Sequence[int]],
        sequences: Sequence[Kinds],
        counts: Sequence[int],
        symmetric: bool,
        in_order: bool,
    ) -> list[Split] | str:
        """A split for each pipeline, or in words why there is none. If the pipelines are cut alike, it is one split,
        made for the slowest link between two stages and the slowest slot of each."""
        hops: Sequence[Hops] = [()] * len(nodes)
        if self._prices.chooses_order:
            hops = self.hops(pool, nodes)
        matrices: list[NDArray[np.int64]] | None = None
        kinds = sequences
        if symmetric:
            kinds = [sequences[0]]
            if len(set(sequences)) > 1:
                kinds = [tuple(tuple(sorted(set().union(*stage))) for stage in zip(*sequences, strict=True))]
            if len(set(hops)) > 1:
                hops = [tuple(pool.links.slowest(np.array(hops), axis=0).tolist())]
        splits: list[Split] = []
        for number, each in enumerate(kinds):
            found = self._prices.split_in_order(pool, each, hops[number], counts[number])
            if found is None and in_order:
                return "no split in this order fits in memory"
            if found is None:
                if matrices is None:
                    matrices = self._matrices(pool, nodes)
                    if symmetric:
                        matrices = [pool.links.slowest(np.stack(matrices), axis=0)]
                found = self._prices.split(pool, each, matrices[number], counts[number])
            if isinstance(found, str):
                return found
            splits.append(found)
        return splits * len(nodes) if symmetric else splits

    def _priced(
        self,
        pool: SlotPool,
        nodes: Sequence[Sequence[int]],
        sequences: Sequence[Kinds],
        splits: Sequence[Split],
    ) -> Callable[..., list[PipelineCost]]:
        """A function from numbers of micro-batches, and a limit in seconds, to the costs of the pipelines. The list
        ends with the first pipeline that does not take less than the limit."""
        ordered = [[row[slot] for slot in cut.order] for row, cut in zip(nodes, splits, strict=True)]
        kinds = [tuple(each[slot] for slot in cut.order) for each, cut in zip(sequences, splits, strict=True)]
        rows = list(zip(kinds, self.hops(pool, ordered), [cut.bounds for cut in splits], strict=True))

        def priced(counts: Sequence[int], below: float = np.inf) -> list[PipelineCost]:
            costs = []
            for (each, hops, bounds), count in zip(rows, counts, strict=True):
                costs.append(self._prices.cost(pool, each, hops, count, bounds))
                if not costs[-1].seconds < below:
                    break
            return costs

        return priced

    def _draft(
        self,
        pool: SlotPool,
        places: Sequence[Sequence[Place]],
        splits: Sequence[Split],
        counts: Sequence[int],
        costs: Sequence[PipelineCost],
        *,
        must_fit: bool = True,
    ) -> Draft | str:
        if must_fit and not all(cost.fits for cost in costs):
            return f"the split by {self.method} does not fit into memory"
        if any(max(cost.transfer_seconds) >= 1.0 / NO_LINK.bytes_per_second for cost in costs):
            return "consecutive stages have no link"
        try:
            synchronization = self.synchronize(pool, _in_order(places, splits), [cut.bounds for cut in splits])
        except ValueError as error:
            return str(error)
        if self.overlap:
            passes = [each for cost in costs for each in zip(cost.forward_seconds, cost.backward_seconds, strict=True)]
            equal = len({cut.bounds for cut in splits}) == 1 and len(set(counts)) == 1
            synchronization = exposed_seconds(synchronization, passes, equal=equal)
        groups = [tuple(np.bincount([kind for kind, _ in each], minlength=len(pool.kinds)).tolist()) for each in places]
        return Draft(
            pool, groups, [list(each) for each in places], list(splits), list(counts), list(costs), synchronization
        )

    def synchronize(self, pool: SlotPool, rows: Sequence[Sequence[Place]], bounds: Sequence[tuple[int, ...]]) -> float:
        """Seconds until every slot has summed the gradients of its blocks, see :class:`.GradientTimes`."""
        return self.summing(pool, rows).seconds(bounds)

    def summing(self, pool: SlotPool, rows: Sequence[Sequence[Place]]) -> Summing:
        """The sums of gradients of these pipelines for any cuts; ``rows`` as for :meth:`synchronize`."""
        groups = [[pool.kinds[kind].slots[slot] for kind, slot in row] for row in rows]
        return Summing(self._gradients, pool.links.node_kind, groups, pool.kinds[0].costs.gradient_bytes)

    def hops(self, pool: SlotPool, nodes: Sequence[Sequence[int]]) -> list[Hops]:
        """The channels between neighboring slots of each pipeline, which share NICs with the other pipelines."""
        return [tuple(row) for row in pool.links.hops(nodes, pool.tensor_parallel)]

    def _matrices(self, pool: SlotPool, nodes: Sequence[Sequence[int]]) -> list[NDArray[np.int64]]:
        """The channels between each two slots of each pipeline if its other stages are in this order."""
        rows = [np.array(row) for row in nodes]
        load = pool.links.load(rows, pool.tensor_parallel)
        return [pool.links.shared(row[:, None], row[None, :], load, pool.tensor_parallel) for row in rows]

    def node(self, pool: SlotPool, place: Place) -> int:
        kind, slot = place
        return self._node_of[pool.kinds[kind].slots[slot][0]]

    def slot(self, pool: SlotPool, kinds: tuple[int, ...], stages: int) -> Slot:
        return self._prices.slot(pool, kinds, stages)


def _in_order(places: Sequence[Sequence[Place]], splits: Sequence[Split]) -> list[list[Place]]:
    return [[each[slot] for slot in cut.order] for each, cut in zip(places, splits, strict=True)]


def write_plan(draft: Draft, topology: Topology, profile: ModelProfile, method: str, notes: Sequence[str]) -> Plan:
    replicas = tuple(_replica(draft, number, topology) for number in range(len(draft.costs)))
    return finished_plan(
        profile,
        replicas,
        method,
        draft.pool.tensor_parallel,
        draft.pool.micro_batch,
        draft.synchronization_seconds,
        notes,
        zero_stage=0 if draft.pool.pipelines is None else 1,
    )


def _replica(draft: Draft, number: int, topology: Topology) -> Replica:
    cost, bounds, row = draft.costs[number], draft.splits[number].bounds, draft.rows[number]
    stages = []
    for stage, (kind, index) in enumerate(row):
        slots = draft.pool.kinds[kind]
        block_bytes = slots.memory_in_pipeline(len(row))
        again = bool(cost.recompute) and cost.recompute[stage]
        if again and (form := slots.recomputed_in_pipeline(len(row))) is not None:
            block_bytes = form[1]
        device = topology.devices[slots.slots[index][0]]
        overhead = device.kind.memory_bytes - block_bytes
        stages.append(
            StagePlan(
                blocks=(bounds[stage], bounds[stage + 1]),
                device=slots.device,
                ranks=slots.slots[index],
                recompute=again,
                node=topology.nodes[device.node].name,
                forward_seconds=cost.forward_seconds[stage],
                backward_seconds=cost.backward_seconds[stage],
                transfer_seconds=cost.transfer_seconds[stage],
                schedule_seconds=cost.schedule_seconds[stage],
                update_seconds=cost.update_seconds[stage],
                memory_bytes=cost.memory_bytes[stage] + overhead,
                memory_overhead_bytes=overhead,
                memory_available_bytes=device.kind.memory_bytes,
            )
        )
    return Replica(stages=tuple(stages), micro_batches=draft.micro_batches[number], pipeline_seconds=cost.seconds)


def finished_plan(
    profile: ModelProfile,
    replicas: Sequence[Replica],
    method: str,
    tensor_parallel: int,
    micro_batch: int,
    synchronization_seconds: float,
    notes: Sequence[str] = (),
    schedule: Schedule = "1f1b",
    order_seconds: GraphSeconds | None = None,
    zero_stage: Literal[0, 1] = 0,
) -> Plan:
    """The plan of these replicas. Its iteration takes as long as the slowest pipeline and the synchronization."""
    return Plan(
        model=profile.name,
        precision=profile.precision,
        blocks=profile.blocks,
        method=method,
        schedule=schedule,
        order_seconds=order_seconds,
        tensor_parallel=tensor_parallel,
        zero_stage=zero_stage,
        micro_batch=micro_batch,
        global_batch=micro_batch * sum(replica.micro_batches for replica in replicas),
        replicas=tuple(replicas),
        synchronization_seconds=synchronization_seconds,
        iteration_seconds=max(replica.pipeline_seconds for replica in replicas) + synchronization_seconds,
        notes=tuple(notes),
    )
