"""Builds one candidate of the search: places the slots, splits the model, divides the micro-batches, predicts times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ..cluster.shared_hops import StageNode, stage_channel, stage_loads, unlike_hop_channels
from ..cluster.topology import Topology
from ..profile.layer_profile import ModelProfile
from ..stages.event_simulation import simulate_cost
from ..stages.pipeline import PipelineCost, Slot, Split
from .gradient_times import GradientTimes, Summing, SummingStage, UnlikeSumming, divide_micro_batches
from .pipeline_prices import NO_LINK, Hops, Kinds, PipelinePrices
from .placement import Place, SlotPool, place, place_together
from .plan import Plan, exposed_seconds
from .predict import StageGroup, finished_plan, finished_replica
from .ranked_plan import ranking_seconds

__all__ = ["Draft", "DraftBuilder", "Where", "simulated_seconds", "write_plan"]


Where = int | StageNode
"""The node of a slot; if slots have different degrees, its node and its degree."""


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
    def devices(self) -> int:
        return sum(self.pool.kinds[kind].tensor_parallel for slots in self.places for kind, _ in slots)

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
        return ranking_seconds(self.seconds, equal=self.is_equal)


class DraftBuilder:
    """Builds drafts. Results for slots that are alike are computed once and then looked up."""

    def __init__(
        self, topology: Topology, method: str, *, overlap: bool = False, runnable: bool = True, quick: bool = False
    ) -> None:
        self.topology = topology
        self.method = method
        self.overlap = overlap
        self.runnable = runnable
        self._node_of = [device.node for device in topology.devices]
        self._cluster_of = [node.cluster for node in topology.nodes]
        self._prices = PipelinePrices(method, quick=quick)
        self._gradients = GradientTimes(topology)
        self._unlike_hops: dict[object, list[Hops]] = {}

    @property
    def chooses_cuts(self) -> bool:
        """True if the method looks for the fastest cuts by the closed form, so that all cuts may be compared."""
        return self.method == "exact"

    def min_micro_batches(self, stages: Iterable[int]) -> list[int]:
        """Least number of micro-batches for pipelines of these numbers of stages."""
        return [number if self.runnable else 1 for number in stages]

    def build(
        self, pool: SlotPool, groups: Sequence[Sequence[int]], *, symmetric: bool = False, thorough: bool = False
    ) -> Draft | str:
        """The draft with these groups, or in words why there is none."""
        drafts: dict[object, Draft | str] = {}
        for placed in (place, place_together):
            places = placed(groups, pool.kinds, self._node_of, self._cluster_of)
            look = tuple(
                sorted(tuple((kind, self.where(pool, (kind, slot))) for kind, slot in each) for each in places)
            )
            if look not in drafts:
                drafts[look] = self.build_placed(pool, places, symmetric=symmetric, thorough=thorough)
        found = [draft for draft in drafts.values() if isinstance(draft, Draft)]
        return min(found, key=lambda draft: draft.seconds) if found else next(iter(drafts.values()))

    def build_placed(
        self,
        pool: SlotPool,
        places: Sequence[Sequence[Place]],
        *,
        symmetric: bool = False,
        thorough: bool = False,
        in_order: bool = False,
    ) -> Draft | str:
        """The draft with these slots, or in words why there is none; further arguments as in :meth:`build`."""
        nodes = [[self.where(pool, place) for place in pipeline] for pipeline in places]
        sequences: list[Kinds] = [tuple((kind,) for kind, _ in pipeline) for pipeline in places]
        total = pool.total_micro_batches
        minimum = self.min_micro_batches(map(len, places))
        if symmetric:
            counts = [total // len(places)] * len(places)
        elif sum(minimum) > total:
            return f"{total} micro-batches are too few for the stages of all replicas"
        else:
            counts = [max(each, round(total / len(places))) for each in minimum]
        while True:
            splits = self._splits(pool, nodes, sequences, counts, symmetric, thorough, in_order)
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
        nodes = [[self.where(pool, place) for place in row] for row in rows]
        sequences: list[Kinds] = [tuple((kind,) for kind, _ in row) for row in rows]
        splits = [Split(tuple(range(len(row))), cut) for row, cut in zip(rows, bounds, strict=True)]
        costs = self._priced(pool, nodes, sequences, splits)(micro_batches, below)
        if not costs[-1].seconds < below:
            return "a pipeline takes too long"
        return self._draft(pool, rows, splits, micro_batches, costs, must_fit=must_fit)

    def _splits(
        self,
        pool: SlotPool,
        nodes: Sequence[Sequence[Where]],
        sequences: Sequence[Kinds],
        counts: Sequence[int],
        symmetric: bool,
        thorough: bool,
        in_order: bool,
    ) -> list[Split] | str:
        """A split for each pipeline, or in words why there is none. If the pipelines are cut alike, it is one split,
        made for the slowest link between two stages and the slowest slot of each."""
        hops: Sequence[Hops] = [()] * len(nodes)
        if self._prices.chooses_order and not thorough:
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
            wholly = self._prices.chooses_order and thorough
            found = None if wholly else self._prices.split_in_order(pool, each, hops[number], counts[number])
            if found is None and in_order:
                return "no split in this order fits in memory"
            if found is None:
                if matrices is None:
                    matrices = self._matrices(pool, nodes)
                    if symmetric:
                        matrices = [pool.links.slowest(np.stack(matrices), axis=0)]
                found = self._prices.split(pool, each, matrices[number], counts[number], thorough=thorough)
            if isinstance(found, str):
                return found
            splits.append(found)
        return splits * len(nodes) if symmetric else splits

    def _priced(
        self,
        pool: SlotPool,
        nodes: Sequence[Sequence[Where]],
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

    def summing(self, pool: SlotPool, rows: Sequence[Sequence[Place]]) -> Summing | UnlikeSumming:
        """The sums of gradients of these pipelines for any cuts; ``rows`` as for :meth:`synchronize`."""
        if not pool.has_one_form:
            stages = [
                [
                    SummingStage(pool.kinds[kind].slots[slot], pool.kinds[kind].costs.gradient_bytes)
                    for kind, slot in row
                ]
                for row in rows
            ]
            return UnlikeSumming(self.topology, stages)
        groups = [[pool.kinds[kind].slots[slot] for kind, slot in row] for row in rows]
        return Summing(self._gradients, pool.links.node_kind, groups, pool.kinds[0].costs.gradient_bytes)

    def hops(self, pool: SlotPool, nodes: Sequence[Sequence[Where]]) -> list[Hops]:
        """The channels between neighboring slots of each pipeline, which share NICs with the other pipelines."""
        if pool.has_one_form:
            return [tuple(row) for row in pool.links.hops(cast(Sequence[Sequence[int]], nodes), pool.tensor_parallel)]
        key = (pool, tuple(map(tuple, nodes)))
        if key not in self._unlike_hops:
            stages = cast(Sequence[Sequence[StageNode]], nodes)
            try:
                channels = unlike_hop_channels(self.topology, stages)
            except ValueError:
                self._unlike_hops[key] = [(-1,) * (len(row) - 1) for row in nodes]
            else:
                self._unlike_hops[key] = [tuple(map(pool.links.number, row)) for row in channels]
        return self._unlike_hops[key]

    def _matrices(self, pool: SlotPool, nodes: Sequence[Sequence[Where]]) -> list[NDArray[np.int64]]:
        """The channels between each two slots of each pipeline if its other stages are in this order."""
        if pool.has_one_form:
            rows = [np.array(row) for row in nodes]
            load = pool.links.load(rows, pool.tensor_parallel)
            return [pool.links.shared(row[:, None], row[None, :], load, pool.tensor_parallel) for row in rows]
        stages = cast(Sequence[Sequence[StageNode]], nodes)
        try:
            loads = stage_loads(self.topology, stages)
        except ValueError:
            loads = Counter()

        def number(one: StageNode, other: StageNode) -> int:
            try:
                return pool.links.number(stage_channel(self.topology, one, other, loads))
            except ValueError:
                return -1

        return [
            np.array([[number(one, other) for other in row] for one in row], dtype=np.int64).reshape(len(row), -1)
            for row in stages
        ]

    def where(self, pool: SlotPool, place: Place) -> Where:
        node = self.node(pool, place)
        return node if pool.has_one_form else StageNode(node, pool.kinds[place[0]].tensor_parallel)

    def node(self, pool: SlotPool, place: Place) -> int:
        kind, slot = place
        return self._node_of[pool.kinds[kind].slots[slot][0]]

    def slot(self, pool: SlotPool, kinds: tuple[int, ...], stages: int) -> Slot:
        return self._prices.slot(pool, kinds, stages)


def simulated_seconds(draft: Draft) -> float:
    """Time of an iteration of ``draft`` in the event simulation."""
    alike = {(cost, count) for cost, count in zip(draft.costs, draft.micro_batches, strict=True)}
    ends = [simulate_cost(cost, count).seconds for cost, count in alike]
    return max(ends) + draft.synchronization_seconds


def _in_order(places: Sequence[Sequence[Place]], splits: Sequence[Split]) -> list[list[Place]]:
    return [[each[slot] for slot in cut.order] for each, cut in zip(places, splits, strict=True)]


def write_plan(draft: Draft, topology: Topology, profile: ModelProfile, method: str, notes: Sequence[str]) -> Plan:
    """The draft as a plan. Its degree is that of most stages."""
    pool = draft.pool
    degrees = Counter(pool.kinds[kind].tensor_parallel for row in draft.places for kind, _ in row)
    degree = max(degrees, key=lambda each: (degrees[each], each))
    replicas = []
    for pipeline, cut, cost, count in zip(draft.places, draft.splits, draft.costs, draft.micro_batches, strict=True):
        groups: list[StageGroup] = []
        for slot, again in zip(cut.order, cost.recompute or [False] * len(cut.order), strict=True):
            kind, index = pipeline[slot]
            slots = pool.kinds[kind]
            memory = slots.memory_in_pipeline(len(cut.order))
            if again and (form := slots.recomputed_in_pipeline(len(cut.order))) is not None:
                memory = form[1]
            other = None if slots.tensor_parallel == degree else slots.tensor_parallel
            groups.append(StageGroup(slots.slots[index], slots.device, memory, other, again))
        replicas.append(finished_replica(topology, groups, cut.bounds, cost, count))
    return finished_plan(
        profile,
        replicas,
        method,
        degree,
        pool.micro_batch,
        draft.synchronization_seconds,
        notes,
        zero_stage=0 if pool.pipelines is None else 1,
    )
