"""From groups of slots to a whole plan: where they stand, which blocks each runs, who runs how many micro-batches."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ..cluster.all_reduce import concurrent_seconds, synchronization_seconds
from ..cluster.topology import Channel, Topology
from ..plans.plan import Plan, Replica, StagePlan
from ..profile.layer_costs import LayerCosts
from ..profile.layer_profile import ModelProfile
from ..stages.fixed_order import quick_split
from ..stages.pipeline import Pipeline, PipelineCost, Slot, Split, evaluate
from ..stages.split_methods import split
from .placement import Links, Place, place
from .tp_groups import SlotKind, boundaries

__all__ = ["Assembler", "Draft", "Offer", "deal"]

NO_WAY = Channel("none", 1e-6)
"""Between nodes that cannot reach each other: a plan in which a stage sends this way is no plan."""


Kinds = tuple[tuple[int, ...], ...]
"""By slot of a pipeline: its kind, or all that it is in several pipelines that are cut alike."""


@dataclass(frozen=True, eq=False)
class Offer:
    """What one tensor-parallel degree and micro-batch have to offer."""

    tensor_parallel: int
    micro_batch: int
    kinds: tuple[SlotKind, ...]
    """The weakest first."""
    total_micro_batches: int
    """Per iteration, over all pipelines."""
    links: Links


@dataclass(frozen=True, eq=False)
class Draft:
    """All that a plan says, before it is written down."""

    offer: Offer
    groups: list[tuple[int, ...]]
    """Slots by kind of each pipeline."""
    places: list[list[Place]]
    """``[pipelines][stages]``, by slot of the pipeline, not by stage."""
    splits: list[Split]
    micro_batches: list[int]
    costs: list[PipelineCost]
    synchronization_seconds: float

    @property
    def pipeline_seconds(self) -> float:
        """Of the slowest pipeline."""
        return max(cost.seconds for cost in self.costs)

    @property
    def seconds(self) -> float:
        """Of an iteration."""
        return self.pipeline_seconds + self.synchronization_seconds


def deal(fill: Sequence[float], longest: Sequence[float], micro_batches: int) -> list[int]:
    """How many micro-batches each pipeline runs, so that the last one is done as early as can be.

    Args:
        fill: Seconds of one micro-batch through each pipeline.
        longest: Seconds that each further micro-batch adds.
        micro_batches: In all, at least one for each pipeline.
    """
    first, step = np.asarray(fill), np.maximum(np.asarray(longest), 1e-15)

    def done(seconds: float) -> NDArray[np.int64]:
        return np.minimum(np.maximum((seconds - first) // step + 1, 1), micro_batches).astype(np.int64)

    low, high = float(first.max()), float((first + (micro_batches - 1) * step).max()) * (1 + 1e-12)
    if done(low).sum() < micro_batches:
        while high - low > 1e-13 * high:
            middle = (low + high) / 2
            count = done(middle).sum()
            low, high = (low, middle) if count >= micro_batches else (middle, high)
            if count == micro_batches:
                break
        counts, most = done(low), done(high)
    else:
        # The one pipeline that takes longest for a single micro-batch decides; the others share the rest.
        counts, most = np.ones(len(first), dtype=np.int64), done(low)
    rest = micro_batches - int(counts.sum())
    for pipeline in np.lexsort((np.arange(len(first)), first + counts * step)):
        more = min(rest, int(most[pipeline] - counts[pipeline]))
        counts[pipeline] += more
        rest -= more
    return counts.tolist()


class Assembler:
    """Makes drafts; what was found once for slots that are alike is found again at once."""

    def __init__(self, topology: Topology, method: str) -> None:
        self.topology = topology
        self.method = method
        self._node_of = [device.node for device in topology.devices]
        self._cluster_of = [node.cluster for node in topology.nodes]
        self._splits: dict[object, Split | str] = {}
        self._costs: dict[object, PipelineCost] = {}
        self._rings: dict[object, float] = {}
        self._slots: dict[object, Slot] = {}
        self._offers: list[Offer] = []

    def assemble(
        self, offer: Offer, groups: Sequence[Sequence[int]], *, symmetric: bool = False, thorough: bool = False
    ) -> Draft | str:
        """A draft of the plan with these groups, or why there is none.

        Args:
            groups: Slots by kind of each pipeline, ``[pipelines][kinds]``.
            symmetric: All pipelines are cut alike and run equally many micro-batches; the groups are all alike then.
            thorough: Split by the method itself; else, if that looks for the best order of the stages as well, the
                weakest come first where that fits, which is found in a fraction of the time.
        """
        places = place(groups, offer.kinds, self._node_of, self._cluster_of)
        return self.assemble_places(offer, places, symmetric=symmetric, thorough=thorough)

    def assemble_places(
        self, offer: Offer, places: Sequence[Sequence[Place]], *, symmetric: bool = False, thorough: bool = False
    ) -> Draft | str:
        """A draft with these slots, or why there is none.

        Args:
            places: ``[pipelines][stages]``. Where all are cut alike, slots that are first in their pipelines run the
                same blocks, and so on; they need not be of one kind.
        """
        self._offers.append(offer)  # its id stays its own
        groups = [tuple(Counter(kind for kind, _ in each)[kind] for kind in range(len(offer.kinds))) for each in places]
        nodes = [
            np.array([self._node_of[offer.kinds[kind].slots[slot][0]] for kind, slot in pipeline])
            for pipeline in places
        ]
        sequences: list[Kinds] = [tuple((kind,) for kind, _ in pipeline) for pipeline in places]
        numbers = [offer.links.numbers(row[:, None], row[None, :]) for row in nodes]
        total = offer.total_micro_batches
        counts = [total // len(groups) if symmetric else max(1, round(total / len(groups)))] * len(groups)
        shared, divided = numbers, sequences
        if symmetric:
            # One cut for all: made for the slowest of the ways between two stages, and of the slots of each.
            stack = np.stack(nodes)
            shared = [offer.links.slowest(stack[:, :, None], stack[:, None, :], axis=0)] * len(groups)
            if len(set(sequences)) > 1:
                divided = [tuple(tuple(sorted(set().union(*stage))) for stage in zip(*sequences, strict=True))] * len(
                    groups
                )
        while True:
            splits = []
            for sequence, matrix, count in zip(divided, shared, counts, strict=True):
                found = self._split(offer, sequence, matrix, count, thorough)
                if isinstance(found, str):
                    return found
                splits.append(found)
            costs = self._evaluate(offer, sequences, numbers, counts, splits)
            if symmetric:
                break
            steps = [_longest(cost) for cost in costs]
            fill = [cost.seconds - (count - 1) * step for cost, count, step in zip(costs, counts, steps, strict=True)]
            dealt = deal(fill, steps, total)
            # More micro-batches than a split was made for can need more memory; then it is made again for more.
            again = self._evaluate(offer, sequences, numbers, dealt, splits)
            if all(cost.fits for cost in again):
                counts, costs = dealt, again
                break
            if all(count >= len(sequence) for count, sequence in zip(counts, sequences, strict=True)):
                break
            counts = [max(count, len(sequence)) for count, sequence in zip(counts, sequences, strict=True)]
        if not all(cost.fits for cost in costs):
            return f"the split by {self.method} does not fit into memory"
        if not symmetric and sum(counts) != total:
            return "the memory of a stage does not suffice for its micro-batches in flight"
        if any(max(cost.transfer_seconds) >= 1.0 / NO_WAY.bytes_per_second for cost in costs):
            return "stages that follow each other have no link"
        try:
            synchronization = self._synchronize(offer, places, splits)
        except ValueError as error:
            return str(error)
        return Draft(offer, groups, [list(each) for each in places], splits, counts, costs, synchronization)

    def _pipeline(self, offer: Offer, sequence: Kinds, matrix: NDArray[np.int64], micro_batches: int) -> Pipeline:
        channels = [*offer.links.channels, NO_WAY]
        slots = tuple(self._slot(offer, kinds) for kinds in sequence)
        return Pipeline(slots, tuple(tuple(channels[number] for number in row) for row in matrix), micro_batches)

    def _slot(self, offer: Offer, kinds: tuple[int, ...]) -> Slot:
        """One that is nowhere better than the worst of these kinds, for a stage that runs on all of them."""
        key = (id(offer), kinds)
        if key not in self._slots:
            worst = [offer.kinds[kind] for kind in kinds]
            costs = worst[0].costs
            if len(worst) > 1:
                each = [vars(kind.costs) for kind in worst]
                names = [field.name for field in fields(LayerCosts)]
                costs = LayerCosts(**{name: np.max([one[name] for one in each], axis=0) for name in names})
            name = " or ".join(dict.fromkeys(kind.device for kind in worst))
            self._slots[key] = Slot(name, costs, min(kind.memory_bytes for kind in worst))
        return self._slots[key]

    def _split(
        self, offer: Offer, sequence: Kinds, matrix: NDArray[np.int64], micro_batches: int, thorough: bool
    ) -> Split | str:
        key = (id(offer), sequence, matrix.tobytes(), micro_batches, thorough)
        if key not in self._splits:
            pipeline = self._pipeline(offer, sequence, matrix, micro_batches)
            self._splits[key] = self._split_anew(pipeline, thorough)
        return self._splits[key]

    def _split_anew(self, pipeline: Pipeline, thorough: bool) -> Split | str:
        orders_itself = self.method in ("exact", "simulated", "adapt")
        if orders_itself and not thorough:
            found = quick_split(pipeline)
            if found is not None:
                return found
        try:
            return split(pipeline, self.method, order=None if orders_itself else range(len(pipeline.slots)))
        except ValueError as error:
            return str(error)

    def _evaluate(
        self,
        offer: Offer,
        sequences: Sequence[Kinds],
        numbers: Sequence[NDArray[np.int64]],
        micro_batches: Sequence[int],
        splits: Sequence[Split],
    ) -> list[PipelineCost]:
        costs = []
        for sequence, matrix, count, cut in zip(sequences, numbers, micro_batches, splits, strict=True):
            key = (id(offer), sequence, matrix.tobytes(), count, cut)
            if key not in self._costs:
                self._costs[key] = evaluate(self._pipeline(offer, sequence, matrix, count), cut)
            costs.append(self._costs[key])
        return costs

    def _synchronize_alike(self, offer: Offer, places: Sequence[Sequence[Place]], splits: Sequence[Split]) -> float:
        """Seconds until every stage of pipelines that are cut alike has summed its gradients, all at the same time."""
        groups, sizes = [], []
        gradient = offer.kinds[0].costs.gradient_bytes
        for stage, (start, stop) in enumerate(itertools.pairwise(splits[0].bounds)):
            slots = [pipeline[cut.order[stage]] for pipeline, cut in zip(places, splits, strict=True)]
            groups += list(zip(*(offer.kinds[kind].slots[slot] for kind, slot in slots), strict=True))
            sizes += [float(gradient[start:stop].sum())] * offer.tensor_parallel
        return max(concurrent_seconds(self.topology, groups, sizes))

    def _synchronize(self, offer: Offer, places: Sequence[Sequence[Place]], splits: Sequence[Split]) -> float:
        """Seconds until every slot has summed its blocks' gradients, block by block among those that hold a block.

        Blocks that the same slots hold go together.
        """
        if len(places) == 1:
            return 0.0
        if len({cut.bounds for cut in splits}) == 1:
            return self._synchronize_alike(offer, places, splits)
        slots_on = Counter(
            self._node_of[offer.kinds[kind].slots[slot][0]] for pipeline in places for kind, slot in pipeline
        )
        cuts = boundaries([cut.bounds for cut in splits])
        gradient = np.concatenate([[0.0], np.cumsum(offer.kinds[0].costs.gradient_bytes)])
        spent = [0.0] * sum(len(pipeline) for pipeline in places)
        offset = np.cumsum([0, *(len(pipeline) for pipeline in places)]).tolist()
        stage_of = [np.searchsorted(cut.bounds, cuts[:-1], side="right").tolist() for cut in splits]
        ranks = [[offer.kinds[kind].slots[slot][0] for kind, slot in pipeline] for pipeline in places]
        for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
            slots = [cut.order[stages[number] - 1] for cut, stages in zip(splits, stage_of, strict=True)]
            group = [pipeline[slot] for pipeline, slot in zip(ranks, slots, strict=True)]
            seconds = self._ring(offer, group, float(gradient[stop] - gradient[start]), slots_on)
            for first, slot in zip(offset, slots, strict=False):
                spent[first + slot] += seconds
        return max(spent)

    def _ring(self, offer: Offer, group: Sequence[int], size: float, slots_on: Counter[int]) -> float:
        """One sum over replicas, while the other slots of its nodes sum theirs."""
        nodes = Counter(self._node_of[rank] for rank in group)
        sharing = offer.tensor_parallel
        if len(nodes) > 1:
            # A ring leaves a node once, however many of its members are there.
            sharing *= max(math.ceil(slots_on[node] / count) for node, count in nodes.items())
        alike = Counter((int(offer.links.node_kind[node]), count) for node, count in nodes.items())
        key = (len(nodes) == 1, frozenset(alike.items()), size, sharing)
        if key not in self._rings:
            self._rings[key] = synchronization_seconds(self.topology, group, size, sharing)
        return self._rings[key]


def _longest(cost: PipelineCost) -> float:
    times = zip(cost.forward_seconds, cost.backward_seconds, cost.transfer_seconds, strict=True)
    return max(sum(each) for each in times)


def write_plan(draft: Draft, topology: Topology, profile: ModelProfile, method: str, notes: Sequence[str]) -> Plan:
    """The draft as a plan."""
    offer = draft.offer
    replicas = []
    for pipeline, cut, cost, count in zip(draft.places, draft.splits, draft.costs, draft.micro_batches, strict=True):
        stages = []
        for number, slot in enumerate(cut.order):
            kind, index = pipeline[slot]
            ranks = offer.kinds[kind].slots[index]
            stages.append(
                StagePlan(
                    blocks=(cut.bounds[number], cut.bounds[number + 1]),
                    device=offer.kinds[kind].device,
                    ranks=ranks,
                    node=topology.nodes[topology.devices[ranks[0]].node].name,
                    forward_seconds=cost.forward_seconds[number],
                    backward_seconds=cost.backward_seconds[number],
                    transfer_seconds=cost.transfer_seconds[number],
                    update_seconds=cost.update_seconds[number],
                    memory_bytes=cost.memory_bytes[number],
                    memory_available_bytes=offer.kinds[kind].memory_bytes,
                )
            )
        replicas.append(Replica(stages=tuple(stages), micro_batches=count, pipeline_seconds=cost.seconds))
    return Plan(
        model=profile.name,
        blocks=profile.blocks,
        method=method,
        tensor_parallel=offer.tensor_parallel,
        micro_batch=offer.micro_batch,
        global_batch=offer.micro_batch * offer.total_micro_batches,
        replicas=tuple(replicas),
        synchronization_seconds=draft.synchronization_seconds,
        iteration_seconds=draft.seconds,
        notes=tuple(notes),
    )
