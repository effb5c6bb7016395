"""A lower bound on the time of an iteration of all plans.

[Note: how the bound is found] A plan belongs to one pool (tensor-parallel degree and micro-batch), has D pipelines, and
either no block whose gradients are summed inside a node, or one. Let j be the largest number of blocks in a slot whose
rings cross (see [Note: a lower bound on sums of gradients]). Its time is at least that of its sums, S, and that in
which pipelines can run all micro-batches, P (see [Note: a bound on the micro-batches of all pipelines]):

- If all rings cross, no stage has more than j blocks, and S is at least that of D pipelines and that of j blocks.
- Else let Q be the kinds with a slot that sums a block inside its node. There all D pipelines have a slot, so if each
  node has slots of one kind only, every pipeline has a slot of each kind in Q. Stages of other kinds have at most j
  blocks. S is at least that of j blocks.
- With one pipeline S is 0.

In the second case, let a pipeline lie in one node. At least B − j of its B blocks are summed inside this node. So all D
pipelines have these blocks there, each in at most L = s − D + 1 slots, where s is the number of slots of the node. One
of its stages has at least (B − j) / L of them, and one of the pipelines runs at least K / D micro-batches, which gives
a bound on P. Where this is enough, only plans are left in which every pipeline leaves each node that sums a block. So
messages from there share its NICs with those of all pipelines (see [Note: pipelines that leave a node]). If L = 1, all
stages in these nodes send such messages; if L = 2, all but the first and the last one of a pipeline. And a pipeline
enters all of these nodes but the first one over such a link.

P falls and S grows with D and with j. So of ranges of D and j, S at the beginning and P at the end give a bound. Ranges
are halved, those with the lowest bound first, until no bound is below what was asked for. First Q may be any part of
the kinds; where that is not enough, each set is looked at. And bounds grow in steps of 1 %: by so much, the prices that
are known from the range before often raise a bound without a further step of linear programming.
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

from ..cluster.topology import Topology
from ..slots.placement import SlotPool
from ..slots.tp_groups import compositions
from .few_kinds import few_kinds
from .gradient_bounds import GradientBounds
from .packing import Basis
from .pipeline_bounds import BlockLimits, PipelineBounds, smallest_message
from .pipeline_types import PipelineTypes
from .relaxed_pools import RelaxedPool

__all__ = ["IterationBound"]

PRECISION = 1e-3
"""Relative: ranges are not halved if the bound can grow by less."""
FEW_SUMS = 0.02
"""Relative to P: if S grows by less, sets Q are told apart before ranges of j are halved, which most need not be."""
STEP = 0.01
"""Relative: so far above the lowest bound others are looked for."""
ROUGHLY = STEP / 2
"""The precision for ranges that can be halved. It must be less than a step, in which else nothing would be found."""
ROUNDING = 1e-9
NO_LINK = 1e15
"""Seconds of a transfer between nodes that cannot reach each other."""
MAX_KINDS_INSIDE = 3
"""With more kinds, the sets Q are not told apart."""


@dataclass(frozen=True)
class _Range:
    """Some of the plans of a pool."""

    pipelines: tuple[int, int]
    """The smallest and the largest number."""
    blocks: tuple[int, int]
    """j, the smallest and the largest."""
    inside: frozenset[int] | None
    """Kinds of which Q is a part; empty if all rings cross, None if the range has all plans."""
    exactly: bool
    """Whether Q has all kinds of ``inside``; else it has at least one."""
    passes: float
    """P is at least this, in seconds."""
    precision: float = np.inf
    """Relative, with which ``passes`` is the best that linear programming finds; infinite: not known."""


class _Held(NamedTuple):
    """What the memory of slots allows."""

    bounds: PipelineBounds
    fits: NDArray[np.bool_]
    """Which types of pipelines may hold the model, ``[types]``."""


class _Pool:
    """The plans of one pool."""

    def __init__(self, topology: Topology, relaxed: RelaxedPool, *, runnable: bool) -> None:
        pool = _with_few_kinds(relaxed.of(relaxed.most_pipelines))
        self._relaxed, self._by_pool = relaxed, dict[SlotPool, _Held]()
        self.total = pool.total_micro_batches
        self.available = np.array([len(kind.slots) for kind in pool.kinds])
        self.bounds = PipelineBounds.of_pool(pool)
        self.gradients = GradientBounds(topology, pool)
        self._message = smallest_message(pool)
        self.runnable = runnable
        self._types: dict[object, PipelineTypes] = {}
        power = 1.0 / self.bounds.work_seconds
        self._power = float(self.available @ power)
        counts = np.minimum(self.available, self.bounds.blocks)
        self._compositions = compositions([1.0] * len(counts), counts, self.bounds.blocks)
        self._counts = self._compositions.astype(float)
        self._basis: Basis = ()

    @property
    def whole(self) -> _Range:
        """All plans."""
        pipelines = int(min(self.available.sum(), self.total))
        return _Range((1, pipelines), (0, self.bounds.blocks), None, False, self.total / self._power)

    def seconds(self, part: _Range) -> float:
        """The bound on the plans of a range."""
        return part.passes + self.sums(part)

    def improved(self, part: _Range, below: float, precision: float) -> _Range:
        """The range with a better bound by linear programming, which need not be the best if it is not below."""
        high = below - self.sums(part)
        low, self._basis = self._types_of(part, below).least_seconds(
            self.available, part.pipelines[1], part.passes, high, self._basis, precision
        )
        return replace(part, passes=max(low, part.passes), precision=precision if low < high else np.inf)

    def sums(self, part: _Range) -> float:
        """Seconds that the sums of gradients take at least."""
        if part.inside is None:
            return 0.0
        sums = self.gradients.of_blocks(part.pipelines[0], part.blocks[0])
        return sums if part.inside else max(sums, self.gradients.of_pipelines(part.pipelines[0]))

    def parts(self, part: _Range) -> Iterator[_Range]:
        """The range in parts; none if it is not worth dividing."""
        part = replace(part, precision=np.inf)
        (least, most), (low, high) = part.pipelines, part.blocks
        if part.inside is None:
            yield replace(part, pipelines=(1, 1), inside=frozenset(), exactly=True)
            if most > 1:
                yield replace(part, pipelines=(2, most), blocks=(1, high), inside=frozenset(), exactly=True)
            for pipelines in range(2, min(most, self.gradients.slots_in_a_node) + 1):
                yield replace(part, pipelines=(pipelines, pipelines), inside=self._kinds_inside(pipelines))
            return
        begin = self.sums(part)
        by_pipelines = self.sums(replace(part, pipelines=(most, most))) - begin
        by_blocks = self.sums(replace(part, blocks=(high, high))) - begin
        if least < most and (by_pipelines >= by_blocks or low == high):
            middle = math.isqrt(least * most)
            yield replace(part, pipelines=(least, middle))
            yield replace(part, pipelines=(middle + 1, most))
        elif part.inside and not part.exactly and self._tells_kinds and by_blocks < FEW_SUMS * part.passes:
            for number in range(1, len(part.inside) + 1):
                for kinds in itertools.combinations(sorted(part.inside), number):
                    yield replace(part, inside=frozenset(kinds), exactly=True)
        elif low < high and by_blocks > PRECISION * part.passes:
            middle = (low + high) // 2
            yield replace(part, blocks=(low, middle))
            yield replace(part, blocks=(middle + 1, high))

    def _kinds_inside(self, pipelines: int) -> frozenset[int]:
        """The kinds that may have a node in which all pipelines have a slot."""
        enough = self.gradients.most_in_a_node >= pipelines
        return frozenset(np.flatnonzero(enough | (not self._tells_kinds)).tolist())

    @property
    def _tells_kinds(self) -> bool:
        """Whether the sets Q are told apart."""
        return self.gradients.one_kind_per_node and len(self.available) <= MAX_KINDS_INSIDE

    def _types_of(self, part: _Range, below: float) -> PipelineTypes:
        """The types of pipelines that plans of the range can have, if they take less than so many seconds."""
        kinds = len(self.available)
        free, needed = np.full(kinds, self.bounds.blocks), np.zeros(kinds, dtype=np.int64)
        (pipelines, _), (_, crossing) = part.pipelines, part.blocks
        together, message = self.bounds.blocks, 0.0
        delays, undelayed = np.zeros(kinds), 0
        if part.inside is not None and part.pipelines[1] > 1:
            outside = [kind for kind in range(kinds) if kind not in part.inside]
            free[outside] = 0
            if part.inside:
                together = self.gradients.crossing_blocks(pipelines, crossing)
            if part.inside and self._tells_kinds:
                inside = sorted(part.inside)
                if part.exactly:
                    needed[inside] = 1
                # In a node where all have a slot, this many are left for one of them.
                left = self.gradients.most_in_a_node - pipelines + 1
                free[inside] = (self.gradients.nodes_with(pipelines) * left)[inside]
                if self._in_one_node(part) + self.sums(part) >= below:
                    crowded = self.gradients.crowded_message_seconds(self._message, pipelines)
                    message = float(crowded[inside].min())
                    longer = [kind for kind in inside if left[kind] <= 2]
                    delays[longer] = np.maximum(crowded[longer] - self.bounds.transfer_seconds, 0.0)
                    undelayed = 2 if (left[longer] == 2).any() else 0
        held = self._held_by(part.pipelines[1])
        key = id(held), free.tobytes(), delays.tobytes(), crossing, together, needed.tobytes(), message
        if key not in self._types:
            counts = self._compositions
            able = held.fits & (counts >= needed).all(axis=1) & (counts.sum(axis=1) > (message > 0))
            counts = counts[able]
            limits = BlockLimits(
                free, tuple(delays.tolist()), undelayed, crossing, self.gradients.nodes_with(1), together
            )
            first, further = held.bounds.options(counts, limits)
            stages, nodes = counts.sum(axis=1), np.maximum(self._nodes(counts), 1 + (message > 0))
            usual = min(max(self.gradients.message_seconds(self._message) - self.bounds.transfer_seconds, 0.0), NO_LINK)
            entered = max(int(needed.sum()) - 1, 1) if message > 0 else 0
            more = usual * np.maximum(nodes - 1 - entered, 0)
            more += entered * max(message - self.bounds.transfer_seconds, usual)
            first = first + 2 * more
            if not delays.any():
                # In a pipeline with one stage in each node, also the longest stage sends to another node.
                further = np.where((nodes == stages) & (stages > 1), further + usual, further)
            first_of_all = np.full((len(first), len(able)), np.inf)
            further_of_all = np.ones_like(first_of_all)
            first_of_all[:, able], further_of_all[:, able] = first, further
            least = self._compositions.sum(axis=1) if self.runnable else np.ones(len(able), dtype=np.int64)
            self._types[key] = PipelineTypes(self._counts, first_of_all, further_of_all, least, self.total)
        return self._types[key]

    def _in_one_node(self, part: _Range) -> float:
        """Seconds of the passes at least if one of the pipelines lies in one node and a node sums a block."""
        pipelines, blocks = part.pipelines[0], self.bounds.blocks - part.blocks[1]
        if blocks < 1:
            return 0.0
        left = self.gradients.most_in_a_node - pipelines + 1
        longest = min(self.bounds.min_seconds(kind, -(-blocks // int(left[kind]))) for kind in part.inside or ())
        return -(-self.total // pipelines) * longest * (1 - ROUNDING)

    def _held_by(self, pipelines: int) -> _Held:
        """What slots of plans with at most so many pipelines hold."""
        pool = self._relaxed.of(pipelines)
        if pool not in self._by_pool:
            bounds = PipelineBounds.of_pool(_with_few_kinds(pool))
            counts = self._compositions
            in_flight = counts.sum(axis=1) if self.runnable else np.ones(len(counts), dtype=np.int64)
            self._by_pool[pool] = _Held(bounds, bounds.fits(counts, in_flight))
        return self._by_pool[pool]

    def _nodes(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """In how many nodes pipelines of these compositions are at least, ``[types]``."""
        if self.gradients.one_kind_per_node:
            return np.asarray((-(-counts // np.maximum(self.gradients.most_in_a_node, 1))).sum(axis=1))
        return np.asarray(-(-counts.sum(axis=1) // self.gradients.slots_in_a_node))


def _with_few_kinds(pool: SlotPool) -> SlotPool:
    return replace(pool, kinds=few_kinds(pool.kinds))


class IterationBound:
    """No 1F1B plan, with communication that does not overlap, takes less than a time that is found step by step.

    Args:
        topology: machines; plans may leave some out.
        pools: the slots for each degree and micro-batch that plans may have, all of one form.
        runnable: whether only plans count in which every pipeline has as many micro-batches as stages.
    """

    def __init__(self, topology: Topology, pools: Sequence[RelaxedPool], *, runnable: bool = True) -> None:
        self._whole = [_Pool(topology, pool, runnable=runnable) for pool in pools]
        self._open: list[tuple[float, int, _Pool, _Range]] = []
        self._number = itertools.count()

    def seconds(self, below: float, *, enough: float = np.inf, time_limit_seconds: float = np.inf) -> float:
        """The bound; not larger than ``below``.

        Args:
            below: seconds of a plan; finite, and not larger than in earlier calls.
            enough: a bound that is not lower than this need not be the best.
            time_limit_seconds: after this the bound need not be the best.
        """
        end = time.monotonic() + time_limit_seconds
        while self._whole:
            pool = self._whole.pop()
            self._add(pool, pool.whole, below)
        while self._open and self._open[0][0] < below:
            seconds, _, pool, part = self._open[0]
            if seconds >= enough or time.monotonic() > end:
                return seconds
            parts = list(pool.parts(part)) if part.precision < np.inf else []
            if not parts and part.precision <= PRECISION:
                return seconds
            if not parts:
                goal = min(below, seconds * (1 + STEP))
                parts = [pool.improved(part, goal, PRECISION if part.precision < np.inf else ROUGHLY)]
            heapq.heappop(self._open)
            for each in parts:
                self._add(pool, each, below)
        return below * (1 - 2 * ROUNDING)

    def _add(self, pool: _Pool, part: _Range, below: float) -> None:
        seconds = pool.seconds(part) * (1 - ROUNDING)
        # A bound that is found is never above "below", so one that reaches it may be lower by rounding.
        if seconds < below * (1 - 2 * ROUNDING):
            heapq.heappush(self._open, (seconds, next(self._number), pool, part))
