"""Splits and costs of single pipelines whose slots are given, each computed once: among the thousands of candidates of
a search, few pipelines differ in what matters, the kinds of their slots and the channels between neighboring stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Channel
from ..profile.layer_costs import LayerCosts
from ..stages.fixed_order import split_in_order
from ..stages.pipeline import Pipeline, PipelineCost, Slot, Split, evaluate_stages
from ..stages.split_methods import split
from .placement import SlotPool

__all__ = ["NO_LINK", "Hops", "Kinds", "PipelinePrices"]

NO_LINK = Channel("none", 1e-6)
"""Between nodes that cannot reach each other. A draft in which stages send over it is rejected."""

Kinds = tuple[tuple[int, ...], ...]
"""Kind of each slot of a pipeline. If several pipelines are cut alike: the kinds that it has in any of them."""
Hops = tuple[int, ...]
"""Numbers of the channels between neighboring slots of a pipeline; −1 where there is no link."""


class PipelinePrices:
    def __init__(self, method: str) -> None:
        self.method = method
        self.chooses_order = method in ("exact", "adapt")
        self._in_order: dict[object, Split | None] = {}
        self._splits: dict[object, Split | str] = {}
        self._costs: dict[object, PipelineCost] = {}
        self._slots: dict[object, Slot] = {}

    def split_in_order(self, pool: SlotPool, kinds: Kinds, hops: Hops, micro_batches: int) -> Split | str | None:
        """The blocks of each slot if each runs the stage of its place, or in words why the method makes no split. None
        if a method that chooses the order finds none in this order."""
        if self.chooses_order:
            key = (pool, kinds, hops, micro_batches)
            if key not in self._in_order:
                slots, channels = self._described(pool, kinds, hops)
                self._in_order[key] = split_in_order(slots, channels, micro_batches)
            return self._in_order[key]
        # Other methods do not look at channels.
        return self.split(pool, kinds, np.full((len(kinds), len(kinds)), -1), micro_batches)

    def split(self, pool: SlotPool, kinds: Kinds, matrix: NDArray[np.int64], micro_batches: int) -> Split | str:
        """The blocks of each slot, and their order if the method chooses it; or in words why there is no split."""
        key = (pool, kinds, matrix.tobytes(), micro_batches)
        if key not in self._splits:
            channels = [*pool.links.channels, NO_LINK]
            slots = tuple(self.slot(pool, each, len(kinds)) for each in kinds)
            rows = tuple(tuple(channels[number] for number in row) for row in matrix)
            order = None if self.chooses_order else range(len(kinds))
            try:
                self._splits[key] = split(Pipeline(slots, rows, micro_batches), self.method, order=order)
            except ValueError as error:
                self._splits[key] = str(error)
        return self._splits[key]

    def cost(
        self, pool: SlotPool, kinds: Kinds, hops: Hops, micro_batches: int, bounds: tuple[int, ...]
    ) -> PipelineCost:
        """Times and memory of a pipeline whose slots are in the order of its stages."""
        key = (pool, kinds, hops, micro_batches, bounds)
        if key not in self._costs:
            slots, channels = self._described(pool, kinds, hops)
            self._costs[key] = evaluate_stages(slots, channels, micro_batches, bounds)
        return self._costs[key]

    def slot(self, pool: SlotPool, kinds: tuple[int, ...], stages: int) -> Slot:
        """A slot that takes as long and needs as much memory, per block, as the worst of these kinds."""
        key = (pool, kinds, stages == 1)
        if key not in self._slots:
            several = [pool.kinds[kind] for kind in kinds]
            name = " or ".join(dict.fromkeys(kind.device for kind in several))
            again = [form for kind in several if (form := kind.recomputed_in_pipeline(stages)) is not None]
            self._slots[key] = Slot(
                name,
                _worst([kind.costs for kind in several]),
                min(kind.memory_in_pipeline(stages) for kind in several),
                (_worst([costs for costs, _ in again]), min(memory for _, memory in again)) if again else None,
            )
        return self._slots[key]

    def _described(self, pool: SlotPool, kinds: Kinds, hops: Sequence[int]) -> tuple[list[Slot], list[Channel]]:
        channels = pool.links.channels
        slots = [self.slot(pool, each, len(kinds)) for each in kinds]
        return slots, [channels[number] if number >= 0 else NO_LINK for number in hops]


def _worst(costs: Sequence[LayerCosts]) -> LayerCosts:
    """Longest time and largest size of each block."""
    if len(costs) == 1:
        return costs[0]
    names = [field.name for field in fields(LayerCosts)]
    return LayerCosts(**{name: np.max([getattr(each, name) for each in costs], axis=0) for name in names})
