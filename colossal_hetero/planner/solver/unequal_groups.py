"""Slots of pipelines that differ: AutoHet's groups (Eq. 3), also with idle devices, and pipelines of one kind each."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from ..cost.placement import SlotPool
from ..cost.ranked_plan import MIN_GAIN
from ..cost.tp_groups import number_of_compositions
from .pipeline_bounds import PipelineBounds

# Device groups -------------------------------------------------------------------------------------------------------
#
# AutoHet, Eq. 2 and 3: maximizes the number of groups times the smallest *effective computing power* of a group.
# Members (devices or tensor-parallel groups) of a kind are interchangeable, so a group is a count of each kind. SciPy's
# integer programming solver (HiGHS) is exact.


TOLERANCE = 1e-9
"""Powers that differ by less than this share count as equal."""

MAX_PATTERNS = 20_000
"""Limit of different members of a group; with more (many speeds), members are only given out in turn."""

MAX_ROUND_ROBIN = 64
"""Numbers of groups for which a first solution is found by giving out the members in turn."""

# [Note: the covering problem] Let each of D groups have to reach the power z. With K micro-batches and P members, G =
# (Σ g n)·K / (K + P − 1) ≥ z is Σ (g − z/K)·n ≥ z·(K − 1)/K, which is linear in the counts n. A member with g ≥ z/K
# never lowers a group's G ("good"). A "bad" one does: it lengthens the pipeline by more than the power it adds. So a
# group needs no more good members than it takes to reach z and the memory; others can join any group. Only few patterns
# remain. D groups that reach z exist if and only if Σ x = D and Σ pattern·x ≤ available (= for bad members, which must
# be in some group) has a solution in whole numbers x. The largest such z is found by bisection.


@dataclass(frozen=True)
class MemberKind:
    """Interchangeable members: devices or tensor-parallel groups."""

    power: float
    """g: computing power of one member, in any unit."""
    memory_bytes: float
    count: int


@dataclass(frozen=True)
class Grouping:
    """Groups of members, and the power that each of them reaches."""

    groups: tuple[tuple[int, ...], ...]
    """Members by kind of each group, ``[groups][kinds]``; in descending order of counts."""
    power: float
    """min_j G_j: the effective computing power of the weakest group."""

    @property
    def objective(self) -> float:
        return len(self.groups) * self.power


def effective_power(
    counts: NDArray[np.int64], powers: Sequence[float] | NDArray[np.float64], micro_batches: float
) -> NDArray[np.float64]:
    """G of groups, ``[…]`` (AutoHet, Eq. 2): power of ``counts``, ``[…, kinds]``, less the share of bubbles."""
    members = np.maximum(counts.sum(axis=-1), 1)
    return np.asarray((counts @ np.asarray(powers)) * micro_batches / (micro_batches + members - 1))


def find_grouping(
    kinds: Sequence[MemberKind],
    model_bytes: float,
    micro_batches: float | Callable[[int], float],
    *,
    groups: int | None = None,
    allow_idle: bool = False,
    max_members: int | None = None,
    max_groups: int | None = None,
    above: float = 0.0,
    precision: float = 4 * TOLERANCE,
    cost: Callable[[int], float] = lambda _: 0.0,
) -> Grouping | None:
    """Groups with the largest ``1 / (1 / objective + cost(groups))`` (AutoHet, Eq. 3a: no cost); None without any."""
    members = sum(kind.count for kind in kinds)
    max_members = max_members or members
    memory = sum(kind.memory_bytes * kind.count for kind in kinds)
    at = micro_batches if callable(micro_batches) else lambda _: micro_batches
    costs = {
        number: cost(number)
        for number in (range(1, min(members, max_groups or members) + 1) if groups is None else (groups,))
    }

    def after_costs(grouping: Grouping) -> float:
        return 1.0 / (1.0 / grouping.objective + costs[len(grouping.groups)])

    problems = []
    for number, lost in costs.items():
        if number * model_bytes > memory * (1 + TOLERANCE) or number > members or lost * above >= 1:
            continue
        if not allow_idle and members > number * max_members:
            continue
        problem = _Covering(kinds, model_bytes, number, at(number), allow_idle, max_members)
        problems.append((-1.0 / (1.0 / (number * problem.bound) + lost), -number, problem))
    # A first solution to compare with saves time and does not change the result.
    some = problems[:: math.ceil(len(problems) / MAX_ROUND_ROBIN)] if problems else []
    found = [grouping for *_, problem in some if (grouping := problem.round_robin()) and after_costs(grouping) > above]
    best = max(found, key=after_costs, default=None)
    for bound, negative, problem in sorted(problems, key=lambda each: each[:2]):
        reached = max(after_costs(best) if best else 0.0, above)
        if -bound <= reached * (1 + max(precision, TOLERANCE)):
            break
        needed = 1.0 / (1.0 / reached - costs[-negative]) if reached > 0 else 0.0
        best = problem.solve(needed / -negative, precision) or best
    return best


class _Covering:
    """Problem for a given number of groups D, see [Note: the covering problem]."""

    def __init__(
        self,
        kinds: Sequence[MemberKind],
        model_bytes: float,
        groups: int,
        micro_batches: float,
        allow_idle: bool,
        max_members: int,
    ) -> None:
        self.powers = np.array([kind.power for kind in kinds], dtype=float)
        self.memory = np.array([kind.memory_bytes for kind in kinds], dtype=float)
        self.available = np.array([kind.count for kind in kinds], dtype=np.int64)
        self.model_bytes = model_bytes * (1 - TOLERANCE)
        self.groups = groups
        self.micro_batches = micro_batches
        self.allow_idle = allow_idle
        self.max_members = max_members
        self.bound = self._bound()

    def _bound(self) -> float:
        """Upper bound on the power of the weakest group: equal groups, with fractions of members."""
        order = np.argsort(-self.powers)
        members, power = np.cumsum(self.available[order]), np.cumsum((self.available * self.powers)[order])
        best = power * self.micro_batches / (self.groups * (self.micro_batches - 1) + np.maximum(members, self.groups))
        return float(best.max() if self.allow_idle else best[-1])

    def solve(self, above: float, precision: float) -> Grouping | None:
        """Best grouping whose weakest group has a power above ``above``; None if there is none."""
        best = self._cover(max(above, self.bound * TOLERANCE) * (1 + 2 * TOLERANCE))
        if best is None:
            return None
        low, high = best.power, self.bound * (1 + 3 * TOLERANCE)
        while high > low * (1 + precision):
            target = (low + high) / 2
            found = self._cover(target)
            if found is not None:
                best, low = found, max(found.power, target)
            else:
                high = target
        return best

    def _grouping(self, counts: NDArray[np.int64]) -> Grouping:
        power = float(effective_power(counts, self.powers, self.micro_batches).min())
        return Grouping(tuple(sorted((tuple(row) for row in counts.tolist()), reverse=True)), power)

    def round_robin(self) -> Grouping | None:
        """Members in descending order of power, each to the weakest group; None if a group then lacks memory."""
        counts = np.tile(self.available // self.groups, (self.groups, 1))
        rest = self.available % self.groups
        have = [(0.0, group) for group in range(self.groups)]
        for kind in np.argsort(-self.powers):
            for _ in range(rest[kind]):
                power, group = have[0]
                counts[group, kind] += 1
                heapq.heapreplace(have, (power + float(self.powers[kind]), group))
        members = counts.sum(axis=1)
        if members.min() < 1 or members.max() > self.max_members or (counts @ self.memory).min() < self.model_bytes:
            return None
        return self._grouping(counts)

    def _cover(self, power: float) -> Grouping | None:
        patterns, good = self._patterns(power)
        if not len(patterns) or not self._may_cover(patterns):
            return None
        upper = self.available.astype(float)
        lower = np.where(good | self.allow_idle, 0.0, upper)
        rows = np.concatenate([patterns.T, np.ones((1, len(patterns)))])
        limits = LinearConstraint(csr_array(rows), np.append(lower, self.groups), np.append(upper, self.groups))
        # Any solution will do; minimizing members gives a direction.
        found = milp(
            patterns.sum(axis=1), integrality=np.ones(len(patterns)), bounds=Bounds(0, np.inf), constraints=limits
        )
        if found.x is None:
            return None
        times = np.rint(found.x).astype(np.int64)
        counts = np.repeat(patterns, times, axis=0)
        if not self.allow_idle:
            self._add_left_over(counts)
        return self._grouping(counts)

    def _may_cover(self, patterns: NDArray[np.int64]) -> bool:
        """True if members, power and memory suffice for D times the smallest amount of any pattern."""
        scales = np.stack([np.ones_like(self.powers), self.powers, self.memory, *np.eye(len(self.powers))])
        needed = (patterns @ scales.T).min(axis=0) * self.groups
        return bool((needed <= scales @ self.available * (1 + TOLERANCE)).all())

    def _add_left_over(self, counts: NDArray[np.int64]) -> None:
        """Give each member that is left over, the strongest first, to the weakest group that has room."""
        left = self.available - counts.sum(axis=0)
        for kind in np.argsort(-self.powers):
            for _ in range(left[kind]):
                power = effective_power(counts, self.powers, self.micro_batches)
                counts[np.where(counts.sum(axis=1) < self.max_members, power, np.inf).argmin(), kind] += 1

    def _patterns(self, power: float) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Groups that reach ``power`` and the memory with the fewest good members; and True for good kinds."""
        worth = self.powers - power / self.micro_batches
        needed = power * (self.micro_batches - 1) / self.micro_batches
        good = worth >= -1e-12 * self.powers
        if not good.any():
            return np.zeros((0, len(worth)), dtype=np.int64), good
        max_members = min(self.max_members, int(self.available.sum()) - self.groups + 1)
        caps = np.minimum(self.available, max_members)
        for kind in np.flatnonzero(good):
            # No more members of a kind are needed than would make up a group alone.
            with np.errstate(divide="ignore"):
                alone = max(needed / max(worth[kind], 1e-300), self.model_bytes / max(self.memory[kind], 1e-300), 1.0)
            if not (~good).any() and alone < caps[kind]:
                caps[kind] = int(np.ceil(alone * (1 + TOLERANCE)))
        last = int(np.where(good, caps, -1).argmax())
        others = [kind for kind in range(len(caps)) if kind != last]
        if number_of_compositions([np.arange(cap + 1) for cap in caps[others]], max_members) > MAX_PATTERNS:
            return np.zeros((0, len(worth)), dtype=np.int64), good
        grid = _grid(caps[others].tolist(), max_members)
        counts = np.zeros((len(grid), len(caps)), dtype=np.int64)
        counts[:, others] = grid
        lacking_memory = (self.model_bytes - counts @ self.memory) / max(self.memory[last], 1e-300)
        short = needed - counts @ worth
        lacking_power = np.where(short <= TOLERANCE * power, 0.0, short / max(worth[last], 1e-300))
        lacking = np.maximum(np.maximum(lacking_memory, lacking_power), (counts.sum(axis=1) == 0).astype(float))
        add = np.ceil(np.maximum(lacking, 0.0) - TOLERANCE)
        fitting = add <= caps[last]
        counts, add = counts[fitting], add[fitting].astype(np.int64)
        counts[:, last] = add
        counts = counts[self._reaches(counts, power)]
        minimal = np.ones(len(counts), dtype=bool)
        for kind in np.flatnonzero(good):
            fewer = counts.copy()
            fewer[:, kind] -= 1
            minimal &= ~((fewer[:, kind] >= 0) & self._reaches(fewer, power))
        return counts[minimal], good

    def _reaches(self, counts: NDArray[np.int64], power: float) -> NDArray[np.bool_]:
        members = counts.sum(axis=1)
        enough = effective_power(counts, self.powers, self.micro_batches) >= power * (1 - TOLERANCE)
        return np.asarray(
            enough & (members >= 1) & (members <= self.max_members) & (counts @ self.memory >= self.model_bytes)
        )


def _grid(caps: Sequence[int], max_sum: int) -> NDArray[np.int64]:
    """All counts from 0 up to ``caps`` whose sum is at most ``max_sum``, ``[rows, kinds]``."""
    rows = np.zeros((1, 0), dtype=np.int64)
    for cap in caps:
        choice = np.arange(cap + 1)
        rows = np.concatenate([np.repeat(rows, len(choice), axis=0), np.tile(choice, len(rows))[:, None]], axis=1)
        rows = rows[rows.sum(axis=1) <= max_sum]
    return rows


PRECISION = 1e-3
"""Share by which groups may be less balanced than the best ones: blocks cannot be divided so finely."""
MIN_SHARE = 0.9
"""Balanced stages may take the wanted time divided by this: stages that are not balanced can be faster."""

MAX_DEALT = 48
"""Most devices for which groups of every number are tried: the best number by bounds need not be the best."""

Groups = list[tuple[int, ...]]
"""Slots by kind of each pipeline, ``[pipelines][kinds]``."""


class UnequalGroups:
    """Groups of the slots of one pool that are of some kinds of devices."""

    def __init__(
        self, pool: SlotPool, bounds: PipelineBounds, allowed: frozenset[str], sums: Callable[[int], float]
    ) -> None:
        self.pool = pool
        self.bounds = bounds
        self.sums = sums
        self._available = np.array([len(kind.slots) if kind.device in allowed else 0 for kind in pool.kinds])

    @property
    def expected_seconds(self) -> float:
        """Estimated seconds of the best plan: as many pipelines as memory allows, idle only while they fill."""
        memory = float(self._available @ np.array(self._memory_bytes))
        slots, total = int(self._available.sum()), self.pool.total_micro_batches
        pipelines = min(int(memory / self._model_bytes), total, slots)
        if self.pool.pipelines is not None:
            pipelines = self.pool.pipelines if self.pool.pipelines <= pipelines else 0
        if pipelines < 1:
            return np.inf
        power = float((self._available / self.bounds.work_seconds).sum())
        return (total + slots - pipelines) / power

    def min_seconds(self, groups: Groups) -> float:
        """Lower bound on the seconds of these pipelines, reached if all end at the same moment."""
        power = (np.array(groups) / self.bounds.work_seconds).sum()
        return float(self.pool.total_micro_batches / power) + self.sums(len(groups))

    def candidates(
        self, stages: Sequence[int] | None, below: float = np.inf, *, may_be_idle: bool = True
    ) -> list[Groups]:
        found = [*self._balanced(below, may_be_idle, self.sums), *self._of_one_device()]
        if self.pool.devices <= MAX_DEALT:
            found += self._dealt()
        distinct: dict[tuple[tuple[int, ...], ...], None] = dict.fromkeys(tuple(sorted(each)) for each in found)
        return [
            list(each)
            for each in distinct
            if self.pool.allows(len(each)) and (stages is None or {sum(group) for group in each} <= set(stages))
        ]

    def _balanced(self, below: float, may_be_idle: bool, sums: Callable[[int], float]) -> Iterator[Groups]:
        """AutoHet's groups, if they can take less than ``below`` seconds; ``sums`` is the cost of their number."""
        pool, available = self.pool, self._available
        present = np.flatnonzero(available)
        kinds = [
            MemberKind(1.0 / pool.kinds[place].model_seconds, self._memory_bytes[place], int(available[place]))
            for place in present
        ]
        # Balanced stages take as many seconds as there are micro-batches, divided by the objective.
        reached = MIN_SHARE * pool.total_micro_batches / below
        for idle in (False, True) if may_be_idle and len(kinds) > 1 else (False,):
            grouping = find_grouping(
                kinds,
                self._model_bytes,
                lambda groups: max(1.0, pool.total_micro_batches / groups),
                allow_idle=idle,
                max_members=self.bounds.blocks,
                groups=pool.pipelines,
                max_groups=pool.total_micro_batches,
                above=reached * MIN_GAIN if idle else reached,
                precision=PRECISION,
                cost=lambda groups: sums(groups) / pool.total_micro_batches,
            )
            if grouping is not None:
                seconds = pool.total_micro_batches / grouping.objective + sums(len(grouping.groups))
                reached = pool.total_micro_batches / seconds
                whole = np.zeros((len(grouping.groups), len(available)), dtype=np.int64)
                whole[:, present] = grouping.groups
                yield [tuple(row) for row in whole.tolist()]

    def _dealt(self) -> Iterator[Groups]:
        """Every number of pipelines, with all slots given out: the strongest first, each to the weakest pipeline."""
        slots = np.repeat(np.arange(len(self._available)), self._available)[::-1].tolist()
        power = (1.0 / self.bounds.work_seconds).tolist()
        for number in range(1, min(len(slots), self.pool.total_micro_batches) + 1):
            groups = [[0] * len(self._available) for _ in range(number)]
            weakest = [(0.0, at) for at in range(number)]
            for kind in slots:
                reached, at = weakest[0]
                groups[at][kind] += 1
                heapq.heapreplace(weakest, (reached + power[kind], at))
            yield [tuple(group) for group in groups]

    def _of_one_device(self) -> Iterator[Groups]:
        """Pipelines of one device each, of like speeds: of each device as many as memory allows, a half of them, …"""
        bound, total, number = self.bounds, self.pool.total_micro_batches, len(self._available)
        unit = np.eye(number, dtype=np.int64)
        slots: dict[str, list[int]] = {}
        for kind, count in enumerate(self._available.tolist()):
            slots.setdefault(self.pool.kinds[kind].device, []).extend([kind] * count)
        most: dict[str, int] = {}
        for device, kinds in slots.items():
            lengths = np.arange(1, min(len(kinds), bound.blocks) + 1)
            held = bound.fits(lengths[:, None] * unit[kinds[0]], np.full(len(lengths), total)) if kinds else lengths < 1
            most[device] = len(kinds) // int(lengths[held][0]) if held.any() else 0
        share = 1
        while max(most.values()) // share >= 1:
            groups: Groups = []
            for device, kinds in slots.items():
                pipelines = max(most[device] // share, 1) if most[device] else 0
                for part in np.array_split(np.array(kinds), pipelines) if pipelines else ():
                    groups.append(tuple(np.bincount(part[: bound.blocks], minlength=number).tolist()))
            yield groups
            share *= 2

    @property
    def _model_bytes(self) -> float:
        """Least bytes of the slots of a pipeline together (AutoHet's MIN_mem)."""
        costs = self.pool.kinds[0].costs
        return float(costs.state_bytes.sum() + costs.activation_bytes.sum())

    @cached_property
    def _memory_bytes(self) -> list[float]:
        """Memory of a slot by kind, as if its blocks needed as many bytes as those of the first kind's slots."""
        if self.pool.kinds[0].recomputed is None:
            return [kind.memory_bytes for kind in self.pool.kinds]
        return [kind.models_in_memory * self._model_bytes for kind in self.pool.kinds]
