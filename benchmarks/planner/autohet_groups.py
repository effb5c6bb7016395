"""AutoHet's groups (Eq. 2 and 3), exactly, to compare with: the planner deals slots out by a rule instead.

Maximizes the number of groups times the smallest *effective computing power* of a group. Members (devices or
tensor-parallel groups) of a kind are interchangeable, so a group is a count of each kind. SciPy's integer programming
solver (HiGHS) is exact.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from colossal_hetero.planner.cost.tp_groups import number_of_compositions

TOLERANCE = 1e-9
"""Powers that differ by less than this share count as equal."""

PRECISION = 4 * TOLERANCE
"""Share up to which the best power is bisected."""

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
    max_members: int | None = None,
    max_groups: int | None = None,
) -> Grouping | None:
    """Groups of all members with the largest objective (AutoHet, Eq. 3a); None if there are none."""
    members = sum(kind.count for kind in kinds)
    max_members = max_members or members
    memory = sum(kind.memory_bytes * kind.count for kind in kinds)
    at = micro_batches if callable(micro_batches) else lambda _: micro_batches
    problems = []
    for number in range(1, min(members, max_groups or members) + 1) if groups is None else (groups,):
        held = number * model_bytes <= memory * (1 + TOLERANCE)
        if held and number <= members <= number * max_members:
            problem = _Covering(kinds, model_bytes, number, at(number), max_members)
            problems.append((-number * problem.bound, -number, problem))
    # A first solution to compare with saves time and does not change the result.
    some = problems[:: math.ceil(len(problems) / MAX_ROUND_ROBIN)] if problems else []
    found = [grouping for *_, problem in some if (grouping := problem.round_robin())]
    best = max(found, key=lambda grouping: grouping.objective, default=None)
    for bound, negative, problem in sorted(problems, key=lambda each: each[:2]):
        reached = best.objective if best else 0.0
        if -bound <= reached * (1 + PRECISION):
            break
        best = problem.solve(reached / -negative) or best
    return best


class _Covering:
    """Problem for a given number of groups D, see [Note: the covering problem]."""

    def __init__(
        self,
        kinds: Sequence[MemberKind],
        model_bytes: float,
        groups: int,
        micro_batches: float,
        max_members: int,
    ) -> None:
        self.powers = np.array([kind.power for kind in kinds], dtype=float)
        self.memory = np.array([kind.memory_bytes for kind in kinds], dtype=float)
        self.available = np.array([kind.count for kind in kinds], dtype=np.int64)
        self.model_bytes = model_bytes * (1 - TOLERANCE)
        self.groups = groups
        self.micro_batches = micro_batches
        self.max_members = max_members
        self.bound = self._bound()

    def _bound(self) -> float:
        """Upper bound on the power of the weakest group: equal groups, with fractions of members."""
        members, power = float(self.available.sum()), float(self.available @ self.powers)
        return power * self.micro_batches / (self.groups * (self.micro_batches - 1) + max(members, self.groups))

    def solve(self, above: float) -> Grouping | None:
        """Best grouping whose weakest group has a power above ``above``; None if there is none."""
        best = self._cover(max(above, self.bound * TOLERANCE) * (1 + 2 * TOLERANCE))
        if best is None:
            return None
        low, high = best.power, self.bound * (1 + 3 * TOLERANCE)
        while high > low * (1 + PRECISION):
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
        lower = np.where(good, 0.0, upper)
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
