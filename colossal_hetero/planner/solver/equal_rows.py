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

MAX_ROWS = 16
"""Rows that are built for a set of kinds of devices, in the order of their bounds."""


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
        self._bounds = bounds
        fastest = max(channel.bytes_per_second for pool in pools for channel in pool.links.channels)
        numbers, groups, sums, seconds = [], [], [], []
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
            lengths: NDArray[np.int64] = counts.sum(axis=1)
            sums.append(2 * (copies - 1) / copies * gradients / lengths / fastest)
            micro_batches: NDArray[np.int64] = pool.total_micro_batches // copies
            work = micro_batches / np.maximum(counts @ (1.0 / bound.work_seconds), 1e-300) * (1 - 1e-8)
            seconds.append(np.where(enough_micro_batches(lengths, micro_batches), work + sums[-1], np.inf))
            self._counts.append(counts)
            self._start.append(total)
            total += len(counts)
            numbers.append(np.full(len(counts), number))
            groups.append(copies)
        self._pool_of, self._pipelines, self._sums = (np.concatenate(each) for each in (numbers, groups, sums))
        self._work = np.concatenate(seconds)
        """Lower bounds by work over speed, which are quick, ``[rows]``."""
        self.seconds = self._work.copy()
        """Lower bounds, ``[rows]``: those of work over speed, until better ones are needed."""
        self._left = self._work < below
        self._by_work = np.argsort(self._work, kind="stable")

    def row(self, row: int) -> tuple[SlotPool, tuple[int, ...], int]:
        """Pool, slots of a pipeline by kind, and number of pipelines."""
        number = int(self._pool_of[row])
        counts = self._counts[number][row - self._start[number]]
        return self.pools[number], tuple(counts.tolist()), int(self._pipelines[row])

    def holds(self, tensor_parallel: int) -> bool:
        """True if devices can hold the model with this degree, by the lower bounds."""
        return any(
            np.isfinite(self._bound(np.arange(len(counts)) + start)).any()
            for pool, counts, start in zip(self.pools, self._counts, self._start, strict=True)
            if pool.tensor_parallel == tensor_parallel and len(counts)
        )

    def of_kinds(self, allowed: frozenset[str]) -> NDArray[np.int64]:
        """The best rows that use only devices of these kinds, see :meth:`_best`."""
        usable = np.zeros(len(self.seconds), dtype=bool)
        for number, pool in enumerate(self.pools):
            others = [place for place, kind in enumerate(pool.kinds) if kind.device not in allowed]
            usable[self._part(number)] = (self._counts[number][:, others] == 0).all(axis=1)
        return self._best(usable)

    def of_size(self, devices: int) -> NDArray[np.int64]:
        whole = np.zeros(len(self.seconds), dtype=bool)
        for number, pool in enumerate(self.pools):
            part = self._part(number)
            used = self._counts[number].sum(axis=1) * pool.tensor_parallel * self._pipelines[part]
            whole[part] = used == devices
        return self._best(whole)

    def _part(self, number: int) -> slice:
        return slice(self._start[number], self._start[number] + len(self._counts[number]))

    def _best(self, allowed: NDArray[np.bool_]) -> NDArray[np.int64]:
        """At most :data:`MAX_ROWS` of the allowed rows, in the order of their bounds."""
        rows = self._by_work[allowed[self._by_work]]
        number, stop = 0, 256 * MAX_ROWS
        while True:
            self._improve(rows[number:stop])
            number, stop = min(stop, len(rows)), 2 * stop
            best = np.sort(rows[:number])
            best = best[np.argsort(self.seconds[best], kind="stable")][:MAX_ROWS]
            # Better bounds are never lower.
            if number == len(rows) or self.seconds[best[-1]] < self._work[rows[number]]:
                return best

    def _improve(self, rows: NDArray[np.int64]) -> None:
        rows = rows[self._left[rows]]
        self._left[rows] = False
        pools = self._pool_of[rows]
        for number in np.unique(pools).tolist():
            part = rows[pools == number]
            self.seconds[part] = self._bound(part) + self._sums[part]

    def _bound(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Lower bounds on the seconds of pipelines, of rows of one pool."""
        number = int(self._pool_of[rows[0]])
        micro_batches = self.pools[number].total_micro_batches // self._pipelines[rows]
        return self._bounds[number].seconds(self._counts[number][rows - self._start[number]], micro_batches)


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
