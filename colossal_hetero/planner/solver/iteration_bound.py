"""Lower bound on the time of an iteration of all plans.

[Note: how the bound is found] A plan belongs to one pool (tensor-parallel degree and micro-batch) and has D pipelines.
Let j be the largest number of blocks in a slot whose rings cross (see [Note: a lower bound on sums of gradients]). Its
time is at least that of its sums, S, and that in which pipelines can run all micro-batches, P (see [Note: a bound on
the micro-batches of all pipelines]):

- If all rings cross, no stage has more than j blocks, and S is at least that of D pipelines and that of j blocks.
- Else let Q be the kinds with a slot that sums a block inside its node. There all D pipelines have a slot, so if each
  node has slots of one kind only, every pipeline has a slot of each kind in Q. Stages of other kinds have at most j
  blocks. S is at least that of j blocks.
- With one pipeline S is 0.

P falls and S grows with D and with j. So of ranges of D and j, S at the beginning and P at the end give a bound. Ranges
are halved, those with the lowest bound first, until no bound is below what was asked for. First Q may be any part of
the kinds; where that is not enough, each set is looked at. Bounds grow in steps of 1 %: the prices of the range before
often raise a bound by so much without linear programming.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cost.placement import SlotPool
from ..cost.ranked_plan import ROUNDING
from ..cost.tp_groups import compositions, number_of_compositions
from .gradient_bounds import GradientBounds
from .pipeline_bounds import PipelineBounds, RelaxedPool, least_kind, smallest_message

# Packing -------------------------------------------------------------------------------------------------------------
#
# Solves max Σ v·x with Σ n[k]·x ≤ N[k] for each kind k, Σ x ≤ D, x ≥ 0: linear programs with few rows and thousands of
# columns, by the revised simplex method. Hundreds of them differ in v and D alone, so the last basis of one is nearly
# the best of the next; a general solver takes many times as long. Any prices prove a bound, not only the best.


Floats = NDArray[np.float64]

MAX_STEPS = 200  # limit of steps: columns that are alike can make the method go around in a circle
TOLERANCE = 1e-9  # relative to the largest v or limit

Basis = tuple[int, ...]
"""Column of each row; −1 − r is the slack of row r."""


class Packed(NamedTuple):
    is_too_little: bool  # True if the prices prove that no solution reaches what is needed
    prices: Floats  # of the kinds, not negative, ``[kinds]``
    basis: Basis


def pack(counts: Floats, values: Floats, limits: Floats, needed: float, first: Basis) -> Packed:
    """Prices that prove that less than ``needed`` can be reached; other ones if that much is reached, or not proved.

    ``counts`` is n, ``[columns, kinds]``; ``values`` is v ≥ 0, ``[columns]``; ``limits`` are N and D, ``[kinds + 1]``.
    If the basis ``first`` does not fit into the limits, that of slacks is the first one.
    """
    rows = len(limits)
    slacks = [-1 - row for row in range(rows)]
    basis = list(first)
    matrix = np.column_stack([_column(counts, rows, each) for each in basis]) if basis else np.eye(rows)
    inside = np.linalg.solve(matrix, limits)
    if not basis or inside.min() < -TOLERANCE * limits.max():
        basis, matrix, inside = slacks, np.eye(rows), limits
    least = TOLERANCE * max(float(values.max(initial=0.0)), 1.0)
    for _ in range(MAX_STEPS):
        gained = np.array([values[each] if each >= 0 else 0.0 for each in basis])
        found = np.linalg.solve(matrix.T, gained)
        prices = np.maximum(found[:-1], 0.0)
        cheapest = int(found.argmin())
        if found[cheapest] < -least:
            enters = -1 - cheapest
        else:
            worth = values - counts @ prices
            enters = int(worth.argmax())
            if prices @ limits[:-1] + limits[-1] * max(float(worth[enters]), 0.0) < needed:
                return Packed(True, prices, tuple(basis))
            if gained @ inside >= needed or worth[enters] - found[-1] <= least:
                break
        change = np.linalg.solve(matrix, _column(counts, rows, enters))
        steps = np.full(rows, np.inf)
        np.divide(np.maximum(inside, 0.0), change, out=steps, where=change > TOLERANCE)
        leaves = int(steps.argmin())
        matrix[:, leaves], basis[leaves] = _column(counts, rows, enters), enters
        inside = np.linalg.solve(matrix, limits)
    return Packed(False, prices, tuple(basis))


def _column(counts: Floats, rows: int, number: int) -> Floats:
    return np.append(counts[number], 1.0) if number >= 0 else np.eye(rows)[-1 - number]


# Pipeline types ------------------------------------------------------------------------------------------------------
#
# [Note: a bound on the micro-batches of all pipelines] A type is a composition: n[k] slots of each kind k. Let v be the
# most micro-batches that a pipeline of the type runs in P seconds (see [Note: a lower bound on a pipeline's time]). At
# most D pipelines, x of each type, run at most max Σ v·x with Σ n[k]·x ≤ N[k] for each kind k, Σ x ≤ D, x ≥ 0: the
# plan's own pipelines are one solution. By duality, this is at most Σ λ[k]·N[k] + D·max(0, max (v − Σ λ[k]·n[k])) for
# any prices λ ≥ 0. So prices of one time also prove a bound for others.


@dataclass(frozen=True, eq=False)
class PipelineTypes:
    counts: Floats  # slots by kind, ``[types, kinds]``
    first_seconds: Floats  # of the first micro-batch, ``[options, types]``; see :meth:`.PipelineBounds.options`
    further_seconds: Floats  # of each further one, ``[options, types]``
    min_micro_batches: NDArray[np.int64]  # least number of a pipeline, ``[types]``
    max_micro_batches: int

    def micro_batches(self, seconds: float) -> Floats:
        """Most micro-batches of a pipeline of each type in this time, ``[types]``; 0 if too few."""
        further = ((seconds - self.first_seconds) / self.further_seconds).max(axis=0, initial=-1.0)
        most = np.minimum(np.floor(further * (1 + ROUNDING) + ROUNDING) + 1.0, self.max_micro_batches)
        return np.where(most >= self.min_micro_batches, most, 0.0)

    def least_seconds(
        self, available: NDArray[np.int64], pipelines: int, low: float, high: float, first: Basis
    ) -> tuple[float, Basis]:
        """Lower bound on the time in which all micro-batches can be run, at most ``high``; and the last basis."""
        limits, needed = np.append(available, pipelines).astype(float), self.max_micro_batches * (1 - ROUNDING)

        def packed(seconds: float) -> Packed:
            return pack(self.counts, self.micro_batches(seconds), limits, needed, basis)

        def are_too_few(prices: Floats, seconds: float) -> bool:
            worth = self.micro_batches(seconds) - self.counts @ prices
            return bool(prices @ limits[:-1] + limits[-1] * worth.max(initial=0.0) < needed)

        basis, tried, step = first, high, PRECISION
        while low < high and high > low * (1 + PRECISION):
            is_too_little, prices, basis = packed(tried)
            if is_too_little:
                low = tried
            else:
                high = tried
                # The prices of a time prove nearly as much for times a little below it.
                below, above = low, high
                while above > below * (1 + PRECISION / 4):
                    middle = (below + above) / 2
                    below, above = (middle, above) if are_too_few(prices, middle) else (below, middle)
                low = below
            tried = min((low + high) / 2, low * (1 + step))
            step *= 2
        return low, basis


# Few kinds -----------------------------------------------------------------------------------------------------------


MAX_TYPES = 12_000


def few_kinds(pool: SlotPool) -> SlotPool:
    """The pool with kinds merged until pipelines have at most :data:`MAX_TYPES` compositions, the most similar first.

    A merged kind has all slots of both, and the faster time and larger memory. So no plan gets slower by it.
    """
    merged = list(pool.kinds)
    blocks = len(merged[0].costs.forward_seconds)
    while len(merged) > 1:
        counts = [np.arange(min(len(kind.slots), blocks) + 1) for kind in merged]
        if number_of_compositions(counts, blocks) <= MAX_TYPES:
            break
        times = np.log(np.maximum([kind.model_seconds for kind in merged], 1e-300))
        first = int(np.argmin(np.abs(np.diff(times))))
        one, other = merged[first : first + 2]
        usable, slots = max(one.usable_bytes, other.usable_bytes), (*one.slots, *other.slots)
        merged[first : first + 2] = [replace(least_kind(one, other), usable_bytes=usable, slots=slots)]
    return replace(pool, kinds=tuple(merged))


PRECISION = 1e-3  # relative, of linear programming; and ranges are not halved if the bound can grow by less
STEP = 0.01  # relative: others are looked for so far above the lowest bound
NO_LINK = 1e15  # seconds of a transfer between nodes that cannot reach each other
MAX_KINDS_INSIDE = 3  # limit for telling the sets Q apart


@dataclass(frozen=True)
class _Range:
    pipelines: tuple[int, int]
    blocks: tuple[int, int]  # smallest and largest j
    inside: frozenset[int] | None
    """Kinds of which Q is a part; empty if all rings cross, None if the range has all plans."""
    exactly: bool  # True if Q has all kinds of ``inside``; else it has at least one
    passes: float
    settled: bool = False  # True if ``passes`` is the result of linear programming


class _Pool:
    def __init__(self, relaxed: RelaxedPool) -> None:
        pool = few_kinds(relaxed.of(relaxed.most_pipelines))
        self._relaxed, self._held = relaxed, dict[SlotPool, tuple[PipelineBounds, NDArray[np.bool_]]]()
        self.total = pool.total_micro_batches
        self.available = np.array([len(kind.slots) for kind in pool.kinds])
        self.bounds = PipelineBounds(pool)
        self.gradients = GradientBounds(relaxed.problem.topology, pool)
        self._message = smallest_message(pool)
        self._types: dict[object, PipelineTypes] = {}
        power = 1.0 / self.bounds.work_seconds
        self._power = float(self.available @ power)
        counts = np.minimum(self.available, self.bounds.blocks)
        self._compositions = compositions([1.0] * len(counts), counts, self.bounds.blocks)
        self._counts = self._compositions.astype(float)
        self._basis: Basis = ()

    @property
    def whole(self) -> _Range:
        pipelines = int(min(self.available.sum(), self.total))
        return _Range((1, pipelines), (0, self.bounds.blocks), None, False, self.total / self._power)

    def seconds(self, part: _Range) -> float:
        return part.passes + self.sums(part)

    def improved(self, part: _Range, below: float) -> _Range:
        """Range with a better bound by linear programming, which need not be the best if it is not below."""
        high = below - self.sums(part)
        low, self._basis = self._types_of(part).least_seconds(
            self.available, part.pipelines[1], part.passes, high, self._basis
        )
        return replace(part, passes=max(low, part.passes), settled=low < high)

    def sums(self, part: _Range) -> float:
        if part.inside is None:
            return 0.0
        sums = self.gradients.of_blocks(part.pipelines[0], part.blocks[0])
        return sums if part.inside else max(sums, self.gradients.of_pipelines(part.pipelines[0]))

    def parts(self, part: _Range) -> Iterator[_Range]:
        part = replace(part, settled=False)
        (least, most), (low, high) = part.pipelines, part.blocks
        if part.inside is None:
            yield replace(part, pipelines=(1, 1), inside=frozenset(), exactly=True)
            if most > 1:
                yield replace(part, pipelines=(2, most), blocks=(1, high), inside=frozenset(), exactly=True)
            for pipelines in range(2, min(most, self.gradients.slots_in_a_node) + 1):
                # Kinds that may have a node in which all pipelines have a slot.
                inside = (self.gradients.most_in_a_node >= pipelines) | (not self._tells_kinds)
                kinds = frozenset(np.flatnonzero(inside).tolist())
                yield replace(part, pipelines=(pipelines, pipelines), inside=kinds)
            return
        begin = self.sums(part)
        by_pipelines = self.sums(replace(part, pipelines=(most, most))) - begin
        by_blocks = self.sums(replace(part, blocks=(high, high))) - begin
        if least < most and (by_pipelines >= by_blocks or low == high):
            middle = math.isqrt(least * most)
            yield replace(part, pipelines=(least, middle))
            yield replace(part, pipelines=(middle + 1, most))
        elif part.inside and not part.exactly and self._tells_kinds:
            for number in range(1, len(part.inside) + 1):
                for some in itertools.combinations(sorted(part.inside), number):
                    yield replace(part, inside=frozenset(some), exactly=True)
        elif low < high and by_blocks > PRECISION * part.passes:
            middle = (low + high) // 2
            yield replace(part, blocks=(low, middle))
            yield replace(part, blocks=(middle + 1, high))

    @property
    def _tells_kinds(self) -> bool:
        return self.gradients.one_kind_per_node and len(self.available) <= MAX_KINDS_INSIDE

    def _types_of(self, part: _Range) -> PipelineTypes:
        kinds = len(self.available)
        most, needed = np.full(kinds, self.bounds.blocks), np.zeros(kinds, dtype=np.int64)
        if part.inside is not None and part.pipelines[1] > 1:
            most[[kind for kind in range(kinds) if kind not in part.inside]] = part.blocks[1]
            if part.exactly:
                needed[list(part.inside)] = 1
        pool = self._relaxed.of(part.pipelines[1])
        if pool not in self._held:
            bounds = PipelineBounds(few_kinds(pool))
            self._held[pool] = bounds, bounds.fits(self._compositions, self._compositions.sum(axis=1))
        bounds, fits = self._held[pool]
        key = pool, most.tobytes(), needed.tobytes()
        if key not in self._types:
            able = fits & (self._compositions >= needed).all(axis=1)
            counts = self._compositions[able]
            first, further = bounds.options(counts, most)
            stages, nodes = counts.sum(axis=1), np.maximum(self._nodes(counts), 1)
            more = min(max(self.gradients.message_seconds(self._message) - self.bounds.transfer_seconds, 0.0), NO_LINK)
            first = first + 2 * more * (nodes - 1)
            # If a pipeline has one stage per node, its longest stage sends to another node too.
            further = np.where((nodes == stages) & (stages > 1), further + more, further)
            first_of_all = np.full((len(first), len(able)), np.inf)
            further_of_all = np.ones_like(first_of_all)
            first_of_all[:, able], further_of_all[:, able] = first, further
            least = self._compositions.sum(axis=1)
            self._types[key] = PipelineTypes(self._counts, first_of_all, further_of_all, least, self.total)
        return self._types[key]

    def _nodes(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Least number of nodes of pipelines of these compositions, ``[types]``."""
        if self.gradients.one_kind_per_node:
            return np.asarray((-(-counts // np.maximum(self.gradients.most_in_a_node, 1))).sum(axis=1))
        return np.asarray(-(-counts.sum(axis=1) // self.gradients.slots_in_a_node))


class IterationBound:
    """A time that no 1F1B plan without overlapped communication is below, found step by step."""

    def __init__(self, pools: Sequence[RelaxedPool]) -> None:
        self._whole = [_Pool(pool) for pool in pools]
        self._open: list[tuple[float, int, _Pool, _Range]] = []
        self._number = itertools.count()

    def seconds(self, below: float, *, enough: float = np.inf, time_limit_seconds: float = np.inf) -> float:
        end = time.monotonic() + time_limit_seconds
        while self._whole:
            pool = self._whole.pop()
            self._add(pool, pool.whole, below)
        while self._open and self._open[0][0] < below:
            seconds, _, pool, part = self._open[0]
            if seconds >= enough or time.monotonic() > end:
                return seconds
            parts = list(pool.parts(part)) if part.settled else [pool.improved(part, min(below, seconds * (1 + STEP)))]
            if not parts:
                return seconds
            heapq.heappop(self._open)
            for each in parts:
                self._add(pool, each, below)
        return below * (1 - 2 * ROUNDING)

    def _add(self, pool: _Pool, part: _Range, below: float) -> None:
        seconds = pool.seconds(part) * (1 - ROUNDING)
        # By rounding, a bound that reaches "below" may be a little lower.
        if seconds < below * (1 - 2 * ROUNDING):
            heapq.heappush(self._open, (seconds, next(self._number), pool, part))
