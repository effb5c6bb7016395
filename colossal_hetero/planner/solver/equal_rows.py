"""Pipelines that are cut alike, as rows (degree, micro-batch, number, composition) with lower bounds on their times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cost.placement import SlotPool
from ..cost.runnable import enough_micro_batches
from ..cost.tp_groups import compositions, divisors
from .pipeline_bounds import PipelineBounds


class Shape(NamedTuple):
    """Equal pipelines, ordered by the lower bound."""

    seconds: float
    pool: int
    pipelines: int
    stages: int


class EqualRows:
    """Rows of some pools. A row is a number; see :meth:`row`."""

    def __init__(
        self,
        pools: Sequence[SlotPool],
        bounds: Sequence[PipelineBounds],
        stages: Sequence[int] | None,
        *,
        below: float = np.inf,
    ) -> None:
        self.pools = pools
        fastest = max(channel.bytes_per_second for pool in pools for channel in pool.links.channels)
        numbers, groups, seconds = [], [], []
        self._counts: list[NDArray[np.int64]] = []
        self._start = []
        known: dict[object, NDArray[np.int64]] = {}
        total = 0
        for number, (pool, bound) in enumerate(zip(pools, bounds, strict=True)):
            available = tuple(len(kind.slots) for kind in pool.kinds)
            # The time of the model, nearly in proportion to the micro-batch, decides which kinds are similar.
            alike = (available, tuple(kind.device for kind in pool.kinds), tuple(kind.speed for kind in pool.kinds))
            if alike not in known:
                rows = compositions([kind.model_seconds for kind in pool.kinds], available, bound.blocks)
                known[alike] = rows if stages is None else rows[np.isin(rows.sum(axis=1), stages)]
            rows = known[alike]
            copies_by_kind = np.array(available) // np.maximum(rows, 1)
            max_copies = np.where(rows > 0, copies_by_kind, 1 << 40).min(axis=1)
            parts = [(1, rows[:0])]
            for pipelines in pipeline_counts(pool):
                fitting = np.flatnonzero(max_copies >= pipelines)
                if not len(fitting):
                    break
                parts.append((pipelines, rows[fitting]))
            counts = np.concatenate([rows for _, rows in parts])
            copies = np.concatenate([np.full(len(rows), count) for count, rows in parts])
            gradients = min(float(kind.costs.gradient_bytes.sum()) for kind in pool.kinds)
            summed = 2 * (copies - 1) / copies * gradients / counts.sum(axis=1) / fastest
            self._counts.append(counts)
            self._start.append(total)
            total += len(counts)
            numbers.append(np.full(len(counts), number))
            groups.append(copies)
            seconds.append(_at_least(bound, counts, pool.total_micro_batches // copies, summed, below))
        self._pool_of, self._pipelines = np.concatenate(numbers), np.concatenate(groups)
        self.seconds = np.concatenate(seconds)
        """Lower bounds, ``[rows]``."""
        held = {pool.tensor_parallel for pool, each in zip(pools, seconds, strict=True) if np.isfinite(each).any()}
        self.too_large = {pool.tensor_parallel for pool in pools} - held
        """Tensor-parallel degrees with which the devices cannot hold the model."""
        counts_of_stages = np.concatenate([counts.sum(axis=1) for counts in self._counts])
        totals = np.array([pool.total_micro_batches for pool in pools])[self._pool_of]
        self.seconds[~enough_micro_batches(counts_of_stages, totals // self._pipelines)] = np.inf
        self._by_bound = np.argsort(self.seconds, kind="stable")

    def row(self, row: int) -> tuple[SlotPool, tuple[int, ...], int]:
        """Pool, slots of a pipeline by kind, and number of pipelines."""
        number = int(self._pool_of[row])
        counts = self._counts[number][row - self._start[number]]
        return self.pools[number], tuple(counts.tolist()), int(self._pipelines[row])

    def of_kinds(self, allowed: frozenset[str]) -> NDArray[np.int64]:
        """Rows that use only devices of these kinds, in the order of their bounds."""
        usable = np.zeros(len(self.seconds), dtype=bool)
        for number, pool in enumerate(self.pools):
            others = [place for place, kind in enumerate(pool.kinds) if kind.device not in allowed]
            usable[self._part(number)] = (self._counts[number][:, others] == 0).all(axis=1)
        return self._by_bound[usable[self._by_bound]]

    def of_size(self, devices: int) -> NDArray[np.int64]:
        whole = np.zeros(len(self.seconds), dtype=bool)
        for number, pool in enumerate(self.pools):
            part = self._part(number)
            used = self._counts[number].sum(axis=1) * pool.tensor_parallel * self._pipelines[part]
            whole[part] = used == devices
        return self._by_bound[whole[self._by_bound]]

    def _part(self, number: int) -> slice:
        return slice(self._start[number], self._start[number] + len(self._counts[number]))


def _at_least(
    bound: PipelineBounds,
    counts: NDArray[np.int64],
    micro_batches: NDArray[np.int64],
    summed: NDArray[np.float64],
    below: float,
) -> NDArray[np.float64]:
    """Lower bounds by row: work over speed, which is quick, and the better ones where that is below ``below``."""
    seconds = micro_batches / np.maximum(counts @ (1.0 / bound.work_seconds), 1e-300) + summed
    open_ = seconds < below
    seconds[open_] = bound.seconds(counts[open_], micro_batches[open_]) + summed[open_]
    return seconds


def pipeline_counts(pool: SlotPool) -> list[int]:
    """Possible numbers of pipelines with equally many micro-batches, ascending."""
    return [number for number in divisors(pool.total_micro_batches) if pool.allows(number)]


def shapes(pools: Sequence[SlotPool], bounds: Sequence[PipelineBounds], stages: Sequence[int] | None) -> list[Shape]:
    """All shapes of pipelines whose slots may be of any kinds, in the order of their bounds; arguments as for rows."""
    found = []
    for number, (pool, bound) in enumerate(zip(pools, bounds, strict=True)):
        power = np.repeat(1.0 / bound.work_seconds, [len(kind.slots) for kind in pool.kinds])
        # Power of the fastest slots, by their number.
        power = np.cumsum(np.sort(power)[::-1])
        total = pool.total_micro_batches
        for pipelines in pipeline_counts(pool):
            for length in range(1, min(len(power) // pipelines, bound.blocks) + 1):
                allowed = stages is None or length in stages
                if allowed and enough_micro_batches(length, total // pipelines):
                    seconds = float(total / power[pipelines * length - 1])
                    found.append(Shape(seconds, number, pipelines, length))
    return sorted(found)
