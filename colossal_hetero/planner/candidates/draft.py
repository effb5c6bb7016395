"""Builds one candidate of the search: places the slots, splits the model, divides the micro-batches, predicts times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Channel, Topology
from ..plans.overlap import exposed_seconds
from ..plans.plan import Plan
from ..plans.predict import StageGroup, finished_plan, finished_replica
from ..plans.ranked_plan import ranking_seconds
from ..profile.layer_costs import LayerCosts
from ..profile.layer_profile import ModelProfile
from ..slots.placement import Place, SlotPool, place, place_together
from ..stages.event_simulation import simulate_cost
from ..stages.fixed_order import split_in_order
from ..stages.pipeline import Pipeline, PipelineCost, Slot, Split, evaluate
from ..stages.split_methods import split
from .gradient_times import GradientTimes

__all__ = ["Draft", "DraftBuilder", "divide_micro_batches", "simulated_seconds", "write_plan"]

NO_LINK = Channel("none", 1e-6)
"""Between nodes that cannot reach each other. A draft in which stages send over it is rejected."""


Kinds = tuple[tuple[int, ...], ...]
"""By slot of a pipeline: its kind. If several pipelines are cut alike: the kinds that it has in any of them."""


@dataclass(frozen=True, eq=False)
class Draft:
    """A complete candidate of the search, in terms of slots; :func:`write_plan` makes it a plan."""

    pool: SlotPool
    groups: list[tuple[int, ...]]
    """How many slots of each kind each pipeline has, ``[pipelines][kinds]``."""
    places: list[list[Place]]
    """The slots of each pipeline, ``[pipelines][slots]``; ``splits[p].order`` says which of them runs which stage."""
    splits: list[Split]
    """By pipeline."""
    micro_batches: list[int]
    """By pipeline, per iteration."""
    costs: list[PipelineCost]
    """By pipeline."""
    synchronization_seconds: float
    """Of gradients over the pipelines, per iteration; with overlap only what no pass hides."""

    @property
    def rows(self) -> list[list[Place]]:
        """The slots of each pipeline in the order of the stages."""
        return _in_order(self.places, self.splits)

    @property
    def is_equal(self) -> bool:
        """Whether all pipelines are cut alike and run equally many micro-batches."""
        return len({cut.bounds for cut in self.splits}) == 1 and len(set(self.micro_batches)) == 1

    @property
    def devices(self) -> int:
        """Devices in use."""
        return self.pool.tensor_parallel * sum(len(slots) for slots in self.places)

    @property
    def pipeline_seconds(self) -> float:
        """Time of the slowest pipeline, without synchronization."""
        return max(cost.seconds for cost in self.costs)

    @property
    def seconds(self) -> float:
        """Time of an iteration."""
        return self.pipeline_seconds + self.synchronization_seconds

    @property
    def ranking_seconds(self) -> float:
        """By which drafts are compared, see :func:`~colossal_hetero.planner.plans.ranked_plan.ranking_seconds`."""
        return ranking_seconds(self.seconds, equal=self.is_equal)


def divide_micro_batches(
    fill: Sequence[float], longest: Sequence[float], micro_batches: int, minimum: Sequence[int]
) -> list[int]:
    """How many micro-batches each pipeline runs so that the last pipeline ends as early as possible.

    Args:
        fill: By pipeline, seconds of one micro-batch through the empty pipeline.
        longest: By pipeline, seconds that each further micro-batch adds: the time of its longest stage.
        micro_batches: How many to divide; not fewer than the sum of ``minimum``.
        minimum: By pipeline, how many it runs at least; not below 1.
    """
    # What a pipeline runs in any case counts as its first micro-batch.
    extra = np.asarray(minimum) - 1
    step = np.maximum(np.asarray(longest), 1e-15)
    first = np.asarray(fill) + extra * step
    micro_batches -= int(extra.sum())

    def done(seconds: float) -> NDArray[np.int64]:
        """Micro-batches that each pipeline finishes in this time; at least one."""
        counts: NDArray[np.float64] = np.minimum(np.maximum((seconds - first) // step + 1, 1), micro_batches)
        return counts.astype(np.int64)

    low, high = float(first.max()), float((first + (micro_batches - 1) * step).max()) * (1 + 1e-12)
    if done(low).sum() < micro_batches:
        while high - low > 1e-13 * high:
            middle = (low + high) / 2
            count = done(middle).sum()
            low, high = (low, middle) if count >= micro_batches else (middle, high)
            if count == micro_batches:
                break
        counts, max_counts = done(low), done(high)
    else:
        # The pipeline that takes longest for a single micro-batch decides the time; the others share the rest.
        counts, max_counts = np.ones(len(first), dtype=np.int64), done(low)
    rest = micro_batches - int(counts.sum())
    for pipeline in np.lexsort((np.arange(len(first)), first + counts * step)):
        more = min(rest, int(max_counts[pipeline] - counts[pipeline]))
        counts[pipeline] += more
        rest -= more
    return [int(count) for count in counts + extra]


class DraftBuilder:
    """Builds drafts. Results for slots that are alike are computed once and then looked up.

    Args:
        topology: Machines.
        method: How the layers of a pipeline are split into stages.
        overlap: Whether communication between pipelines overlaps with passes, see
            :func:`~colossal_hetero.planner.plans.overlap.exposed_seconds`.
        runnable: Whether pipelines that are not alike have enough micro-batches for their stages, see
            :mod:`~colossal_hetero.planner.plans.runnable`.
    """

    def __init__(self, topology: Topology, method: str, *, overlap: bool = False, runnable: bool = True) -> None:
        self.topology = topology
        self.method = method
        self.overlap = overlap
        self.runnable = runnable
        self._node_of = [device.node for device in topology.devices]
        self._cluster_of = [node.cluster for node in topology.nodes]
        self._splits: dict[object, Split | str] = {}
        self._costs: dict[object, PipelineCost] = {}
        self._gradients = GradientTimes(topology)
        self._slots: dict[object, Slot] = {}

    @property
    def chooses_cuts(self) -> bool:
        """Whether the method looks for the fastest cuts by the closed form, so that all cuts may be compared."""
        return self.method == "exact"

    def min_micro_batches(self, stages: Iterable[int]) -> list[int]:
        """How many micro-batches pipelines of these numbers of stages run at least."""
        return [number if self.runnable else 1 for number in stages]

    def build(
        self, pool: SlotPool, groups: Sequence[Sequence[int]], *, symmetric: bool = False, thorough: bool = False
    ) -> Draft | str:
        """The draft with these groups, or in words why there is none.

        Args:
            pool: The slots there are.
            groups: Slots by kind of each pipeline, ``[pipelines][kinds]``.
            symmetric: All pipelines are cut alike and run equally many micro-batches. The groups must be equal.
            thorough: Whether the method also chooses the order of the stages, if it can. If not, the stages are in
                ascending order of computing power where that fits in memory, which takes a fraction of the time.
        """
        drafts: dict[object, Draft | str] = {}
        for placed in (place, place_together):
            places = placed(groups, pool.kinds, self._node_of, self._cluster_of)
            look = tuple(sorted(tuple((kind, self.node(pool, (kind, slot))) for kind, slot in each) for each in places))
            if look not in drafts:
                drafts[look] = self.build_placed(pool, places, symmetric=symmetric, thorough=thorough)
        found = [draft for draft in drafts.values() if isinstance(draft, Draft)]
        return min(found, key=lambda draft: draft.seconds) if found else next(iter(drafts.values()))

    def build_placed(
        self, pool: SlotPool, places: Sequence[Sequence[Place]], *, symmetric: bool = False, thorough: bool = False
    ) -> Draft | str:
        """The draft with these slots, or in words why there is none; further arguments as in :meth:`build`.

        Args:
            places: The slots of each pipeline, ``[pipelines][slots]``. If the pipelines are cut alike, the first slots
                of all pipelines run the same blocks, and so on; they need not be of one kind.
        """
        nodes = [np.array([self.node(pool, (kind, slot)) for kind, slot in pipeline]) for pipeline in places]
        sequences: list[Kinds] = [tuple((kind,) for kind, _ in pipeline) for pipeline in places]
        numbers = as_given = self._shared_numbers(pool, nodes, nodes)
        total = pool.total_micro_batches
        minimum = self.min_micro_batches(map(len, places))
        if symmetric:
            counts = [total // len(places)] * len(places)
        elif sum(minimum) > total:
            return f"{total} micro-batches are too few for the stages of all replicas"
        else:
            counts = [max(each, round(total / len(places))) for each in minimum]
        shared_numbers, shared_kinds = numbers, sequences
        if symmetric:
            # One split for all pipelines, made for the slowest link between two stages and the slowest slot of each.
            shared_numbers = [pool.links.slowest(np.stack(numbers), axis=0)] * len(places)
            if len(set(sequences)) > 1:
                shared_kinds = [
                    tuple(tuple(sorted(set().union(*stage))) for stage in zip(*sequences, strict=True))
                ] * len(places)
        while True:
            splits = []
            for sequence, matrix, count in zip(shared_kinds, shared_numbers, counts, strict=True):
                found = self._split(pool, sequence, matrix, count, thorough)
                if isinstance(found, str):
                    return found
                splits.append(found)
            numbers = as_given
            if any(cut.order != tuple(range(len(cut.order))) for cut in splits):
                ordered = [row[list(cut.order)] for row, cut in zip(nodes, splits, strict=True)]
                numbers = self._shared_numbers(pool, nodes, ordered)
            costs = self._evaluate(pool, sequences, numbers, counts, splits)
            if symmetric:
                break
            steps = [max(cost.stage_seconds) for cost in costs]
            fill = [cost.seconds - (count - 1) * step for cost, count, step in zip(costs, counts, steps, strict=True)]
            divided_counts = divide_micro_batches(fill, steps, total, minimum)
            # With more micro-batches than a split was made for, more memory may be needed. Then split again for more.
            again = self._evaluate(pool, sequences, numbers, divided_counts, splits)
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
    ) -> Draft | str:
        """The draft in which nothing is left to choose, or in words why there is none.

        Args:
            pool: The slots there are.
            rows: The slots of each pipeline in the order of the stages.
            bounds: Of the stages of each pipeline.
            micro_batches: Of each pipeline.
        """
        nodes = [np.array([self.node(pool, place) for place in row]) for row in rows]
        sequences: list[Kinds] = [tuple((kind,) for kind, _ in row) for row in rows]
        splits = [Split(tuple(range(len(row))), cut) for row, cut in zip(rows, bounds, strict=True)]
        costs = self._evaluate(pool, sequences, self._shared_numbers(pool, nodes, nodes), micro_batches, splits)
        return self._draft(pool, rows, splits, micro_batches, costs)

    def _draft(
        self,
        pool: SlotPool,
        places: Sequence[Sequence[Place]],
        splits: Sequence[Split],
        counts: Sequence[int],
        costs: Sequence[PipelineCost],
    ) -> Draft | str:
        if not all(cost.fits for cost in costs):
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
        """Seconds until every slot has summed the gradients of its blocks, see :class:`.gradient_times.GradientTimes`.

        Args:
            pool: The slots there are.
            rows: The slots of each pipeline in the order of the stages.
            bounds: Of the stages of each pipeline.

        Raises:
            ValueError: Slots cannot reach each other.
        """
        groups = [[pool.kinds[kind].slots[slot] for kind, slot in row] for row in rows]
        return self._gradients.seconds(pool.links.node_kind, groups, bounds, pool.kinds[0].costs.gradient_bytes)

    @staticmethod
    def _shared_numbers(
        pool: SlotPool, nodes: Sequence[NDArray[np.int64]], ordered: Sequence[NDArray[np.int64]]
    ) -> list[NDArray[np.int64]]:
        """The numbers of the channels between the slots of each pipeline, which share NICs with the other pipelines.

        Args:
            pool: The slots there are.
            nodes: The node of each slot, ``[pipelines][slots]``.
            ordered: The same in the order of the stages.
        """
        load = pool.links.load(ordered, pool.tensor_parallel)
        return [pool.links.shared(row[:, None], row[None, :], load, pool.tensor_parallel) for row in nodes]

    def node(self, pool: SlotPool, place: Place) -> int:
        """The node of a slot."""
        kind, slot = place
        return self._node_of[pool.kinds[kind].slots[slot][0]]

    def _pipeline(self, pool: SlotPool, sequence: Kinds, matrix: NDArray[np.int64], micro_batches: int) -> Pipeline:
        channels = [*pool.links.channels, NO_LINK]
        slots = tuple(self.slot(pool, kinds, len(sequence)) for kinds in sequence)
        return Pipeline(slots, tuple(tuple(channels[number] for number in row) for row in matrix), micro_batches)

    def slot(self, pool: SlotPool, kinds: tuple[int, ...], stages: int) -> Slot:
        """A slot that takes as long and needs as much memory, per block, as the worst of these kinds.

        Args:
            pool: The slots there are.
            kinds: Numbers of the kinds.
            stages: Of the slot's pipeline.
        """
        key = (pool, kinds, stages == 1)
        if key not in self._slots:
            worst = [pool.kinds[kind] for kind in kinds]
            costs = worst[0].costs
            if len(worst) > 1:
                each = [vars(kind.costs) for kind in worst]
                names = [field.name for field in fields(LayerCosts)]
                costs = LayerCosts(**{name: np.max([one[name] for one in each], axis=0) for name in names})
            name = " or ".join(dict.fromkeys(kind.device for kind in worst))
            self._slots[key] = Slot(name, costs, min(kind.memory_in_pipeline(stages) for kind in worst))
        return self._slots[key]

    def _split(
        self, pool: SlotPool, sequence: Kinds, matrix: NDArray[np.int64], micro_batches: int, thorough: bool
    ) -> Split | str:
        key = (pool, sequence, matrix.tobytes(), micro_batches, thorough)
        if key not in self._splits:
            pipeline = self._pipeline(pool, sequence, matrix, micro_batches)
            self._splits[key] = self._compute_split(pipeline, thorough)
        return self._splits[key]

    def _compute_split(self, pipeline: Pipeline, thorough: bool) -> Split | str:
        method_orders = self.method in ("exact", "simulated", "adapt")
        if method_orders and not thorough:
            found = split_in_order(pipeline)
            if found is not None:
                return found
        try:
            return split(pipeline, self.method, order=None if method_orders else range(len(pipeline.slots)))
        except ValueError as error:
            return str(error)

    def _evaluate(
        self,
        pool: SlotPool,
        sequences: Sequence[Kinds],
        numbers: Sequence[NDArray[np.int64]],
        micro_batches: Sequence[int],
        splits: Sequence[Split],
    ) -> list[PipelineCost]:
        costs = []
        for sequence, matrix, count, cut in zip(sequences, numbers, micro_batches, splits, strict=True):
            key = (pool, sequence, matrix.tobytes(), count, cut)
            if key not in self._costs:
                self._costs[key] = evaluate(self._pipeline(pool, sequence, matrix, count), cut)
            costs.append(self._costs[key])
        return costs


def simulated_seconds(draft: Draft) -> float:
    """Time of an iteration of ``draft`` in the event simulation."""
    alike = {(cost, count) for cost, count in zip(draft.costs, draft.micro_batches, strict=True)}
    ends = [simulate_cost(cost, count).seconds for cost, count in alike]
    return max(ends) + draft.synchronization_seconds


def _in_order(places: Sequence[Sequence[Place]], splits: Sequence[Split]) -> list[list[Place]]:
    return [[each[slot] for slot in cut.order] for each, cut in zip(places, splits, strict=True)]


def write_plan(draft: Draft, topology: Topology, profile: ModelProfile, method: str, notes: Sequence[str]) -> Plan:
    """The draft as a plan."""
    pool = draft.pool
    replicas = []
    for pipeline, cut, cost, count in zip(draft.places, draft.splits, draft.costs, draft.micro_batches, strict=True):
        groups: list[StageGroup] = []
        for slot in cut.order:
            kind, index = pipeline[slot]
            slots = pool.kinds[kind]
            groups.append((slots.slots[index], slots.device, slots.memory_in_pipeline(len(cut.order))))
        replicas.append(finished_replica(topology, groups, cut.bounds, cost, count))
    return finished_plan(
        profile,
        replicas,
        method,
        pool.tensor_parallel,
        pool.micro_batch,
        draft.synchronization_seconds,
        notes,
    )
