"""From groups of slots to a whole plan: where they stand, which blocks each runs, who runs how many micro-batches."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .candidates import SlotKind, boundaries
from .layer_profile import ModelProfile
from .mapping import Links, Place, place
from .pipeline import Pipeline, PipelineCost, Slot, Split, evaluate
from .plan import Plan, Replica, StagePlan
from .splits import split
from .topology import Channel, Topology

__all__ = ["Assembler", "Draft", "Offer", "deal"]

NO_WAY = Channel("none", 1e-6)
"""Between nodes that cannot reach each other: a plan in which a stage sends this way is no plan."""

FREE_ORDER = ("exact", "adapt")
"""Methods that look for the order of the stages themselves; the others get the weakest first (AutoHet)."""


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
    places: list[list[Place]]
    """``[pipelines][stages]``, by slot of the pipeline, not by stage."""
    splits: list[Split]
    micro_batches: list[int]
    costs: list[PipelineCost]
    synchronisation_seconds: float

    @property
    def pipeline_seconds(self) -> float:
        """Of the slowest pipeline."""
        return max(cost.seconds for cost in self.costs)

    @property
    def seconds(self) -> float:
        """Of an iteration."""
        return self.pipeline_seconds + self.synchronisation_seconds


def deal(fill: Sequence[float], longest: Sequence[float], micro_batches: int) -> list[int]:
    """How many micro-batches each pipeline runs, so that the last one is done as early as can be.

    Args:
        fill: Seconds of one micro-batch through each pipeline.
        longest: Seconds that each further micro-batch adds.
        micro_batches: In all, at least one for each pipeline.
    """
    first, step = np.asarray(fill), np.maximum(np.asarray(longest), 1e-15)

    def done(seconds: float) -> NDArray[np.int64]:
        return np.clip(np.floor((seconds - first) / step) + 1, 1, micro_batches).astype(np.int64)

    low, high = float(first.max()), float((first + (micro_batches - 1) * step).max())
    if done(low).sum() < micro_batches:
        while high - low > 1e-13 * high:
            middle = (low + high) / 2
            if middle in (low, high):
                break
            low, high = (low, middle) if done(middle).sum() >= micro_batches else (middle, high)
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
        self._alive: list[object] = []

    def assemble(self, offer: Offer, groups: Sequence[Sequence[int]], symmetric: bool = False) -> Draft | str:
        """A draft of the plan with these groups, or why there is none.

        Args:
            groups: Slots by kind of each pipeline, ``[pipelines][kinds]``.
            symmetric: All pipelines are cut alike and run equally many micro-batches; the groups are all alike then.
        """
        self._alive.append(offer)
        places = place(groups, offer.kinds, self._node_of, self._cluster_of)
        nodes = [
            np.array([self._node_of[offer.kinds[kind].slots[slot][0]] for kind, slot in pipeline])
            for pipeline in places
        ]
        sequences = [tuple(kind for kind, _ in pipeline) for pipeline in places]
        numbers = [offer.links.numbers(row[:, None], row[None, :]) for row in nodes]
        total = offer.total_micro_batches
        if symmetric:
            stack = np.stack(nodes)
            worst = offer.links.slowest(stack[:, :, None], stack[:, None, :], axis=0)
            counts = [total // len(groups)] * len(groups)
            found = self._split(offer, sequences[0], worst, counts[0])
            if isinstance(found, str):
                return found
            splits = [found] * len(groups)
        else:
            counts = [max(1, round(total / len(groups)))] * len(groups)
            for _ in range(2):
                splits = []
                for sequence, matrix, count in zip(sequences, numbers, counts, strict=True):
                    found = self._split(offer, sequence, matrix, count)
                    if isinstance(found, str):
                        return found
                    splits.append(found)
                costs = self._evaluate(offer, sequences, numbers, counts, splits)
                steps = [_longest(cost) for cost in costs]
                fill = [
                    cost.seconds - (count - 1) * step for cost, count, step in zip(costs, counts, steps, strict=True)
                ]
                dealt = deal(fill, steps, total)
                if dealt == counts:
                    break
                counts = dealt
        costs = self._evaluate(offer, sequences, numbers, counts, splits)
        if not all(cost.fits for cost in costs):
            return "the memory of a stage does not suffice for its micro-batches in flight"
        try:
            synchronisation = self._synchronise(offer, places, splits)
        except ValueError as error:
            return str(error)
        if max(cost.seconds for cost in costs) >= 1e5 * 1e6:
            return "no link between stages that follow each other"
        return Draft(offer, places, splits, counts, costs, synchronisation)

    def _pipeline(
        self, offer: Offer, sequence: tuple[int, ...], matrix: NDArray[np.int64], micro_batches: int
    ) -> Pipeline:
        channels = [*offer.links.channels, NO_WAY]
        slots = tuple(
            Slot(offer.kinds[kind].device, offer.kinds[kind].costs, offer.kinds[kind].memory_bytes) for kind in sequence
        )
        return Pipeline(slots, tuple(tuple(channels[number] for number in row) for row in matrix), micro_batches)

    def _split(
        self, offer: Offer, sequence: tuple[int, ...], matrix: NDArray[np.int64], micro_batches: int
    ) -> Split | str:
        key = (id(offer), sequence, matrix.tobytes(), micro_batches)
        if key not in self._splits:
            pipeline = self._pipeline(offer, sequence, matrix, micro_batches)
            order = None if self.method in FREE_ORDER else range(len(sequence))
            try:
                self._splits[key] = split(pipeline, self.method, order=order)
            except ValueError as error:
                self._splits[key] = str(error)
        return self._splits[key]

    def _evaluate(
        self,
        offer: Offer,
        sequences: Sequence[tuple[int, ...]],
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

    def _synchronise(self, offer: Offer, places: Sequence[Sequence[Place]], splits: Sequence[Split]) -> float:
        """Seconds until every slot has summed its blocks' gradients, block by block among those that hold a block.

        Blocks that the same slots hold go together, so with pipelines that are cut alike this is one sum per stage.
        """
        if len(places) == 1:
            return 0.0
        cuts = boundaries([cut.bounds for cut in splits])
        gradient = np.concatenate([[0.0], np.cumsum(offer.kinds[0].costs.gradient_bytes)])
        spent = [0.0] * sum(len(pipeline) for pipeline in places)
        offset = np.cumsum([0, *(len(pipeline) for pipeline in places)])
        for start, stop in itertools.pairwise(cuts):
            holders, group = [], []
            for number, (pipeline, cut) in enumerate(zip(places, splits, strict=True)):
                stage = int(np.searchsorted(cut.bounds, start, side="right")) - 1
                slot = cut.order[stage]
                holders.append(int(offset[number]) + slot)
                kind, index = pipeline[slot]
                group.append(offer.kinds[kind].slots[index][0])
            seconds = self._ring(offer, group, float(gradient[stop] - gradient[start]))
            for holder in holders:
                spent[holder] += seconds
        return max(spent)

    def _ring(self, offer: Offer, group: Sequence[int], size: float) -> float:
        nodes = Counter(self._node_of[rank] for rank in group)
        alike = Counter((int(offer.links.node_kind[node]), count) for node, count in nodes.items())
        key = (len(nodes) == 1, frozenset(alike.items()), size)
        if key not in self._rings:
            self._rings[key] = synchronisation_seconds(self.topology, group, size)
        return self._rings[key]


def _longest(cost: PipelineCost) -> float:
    times = zip(cost.forward_seconds, cost.backward_seconds, cost.transfer_seconds, strict=True)
    return max(sum(each) for each in times)


def synchronisation_seconds(topology: Topology, group: Sequence[int], size: float) -> float:
    """Ring all-reduce over the slowest channel of a group."""
    channel = topology.slowest(group)
    ranks = len(group)
    return 2 * (ranks - 1) / ranks * size / channel.bandwidth(size / ranks) + 2 * (ranks - 1) * channel.latency_seconds


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
        synchronisation_seconds=draft.synchronisation_seconds,
        iteration_seconds=draft.seconds,
        notes=tuple(notes),
    )
