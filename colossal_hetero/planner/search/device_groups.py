"""Data-parallel groups of unequal devices: which devices hold a replica of the model together.

AutoHet, Eq. 2 and 3: the number of groups times the least *effective computing power* of a group is made as large as it
can be. Devices (or tensor-parallel groups of them) of one kind are interchangeable, so they are counted, and groups are
patterns of counts. Solved exactly, by SciPy's HiGHS.
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

from .tp_groups import compositions

__all__ = ["Grouping", "GroupingKind", "effective_power", "find_grouping"]

TOLERANCE = 1e-9
"""Powers that differ by less than this share are equal."""
MAX_VALUES = 20_000
"""Compositions up to which the powers that a group can have are listed, rather than bisected."""

MAX_DEALT = 64
"""Numbers of groups for which members are dealt in turn first."""

# [Note: the covering problem]
# For a given number of groups D, let z be the power that each group is to reach. With K micro-batches and P members,
# G = (Σ g n)·K / (K + P − 1) ≥ z reads Σ (g − z/K)·n ≥ z·(K − 1)/K: linear in the counts n. A member with g ≥ z/K never
# hurts ("good"), one with less does ("bad"): its group grows longer by more than it brings. So a group needs no more
# good members than make it reach z and the memory; whatever is left over can join any group. That leaves few patterns,
# and D groups that reach z exist if and only if Σ x = D, Σ pattern·x ≤ available (= available for bad members, which
# must go somewhere) has a solution in whole numbers x. The largest such z is found by bisection, over the powers that
# a group can have at all where these are not too many.


@dataclass(frozen=True)
class GroupingKind:
    """Interchangeable members."""

    power: float
    """g: computing power, in any unit."""
    memory_bytes: float
    count: int


@dataclass(frozen=True)
class Grouping:
    """The best groups."""

    groups: tuple[tuple[int, ...], ...]
    """Members by kind of each group, the largest first: ``[groups][kinds]``."""
    power: float
    """min_j G_j."""

    @property
    def objective(self) -> float:
        """Eq. 3a."""
        return len(self.groups) * self.power


def effective_power(
    counts: NDArray[np.int64], powers: Sequence[float] | NDArray[np.float64], micro_batches: float
) -> NDArray[np.float64]:
    """G of groups, Eq. 2, ``[…]`` from counts ``[…, kinds]``: the sum of powers, less the share of pipeline bubbles."""
    members = np.maximum(counts.sum(axis=-1), 1)
    return (counts @ np.asarray(powers)) * micro_batches / (micro_batches + members - 1)


def find_grouping(
    kinds: Sequence[GroupingKind],
    model_bytes: float,
    micro_batches: float | Callable[[int], float],
    *,
    groups: int | None = None,
    idle: bool = False,
    most_members: int | None = None,
    most_groups: int | None = None,
    least: float = 0.0,
) -> Grouping | None:
    """The groups with the largest Eq. 3a, or None if there are none.

    Args:
        kinds: What there is.
        model_bytes: MIN_mem, what a group's members must hold together.
        micro_batches: K of each group, or K by the number of groups.
        groups: How many; None for the best number.
        idle: Whether members may be left out. AutoHet's Eq. 3e assigns all.
        most_members: Of a group: as many as the model has blocks.
        most_groups: As many as there are micro-batches in all.
        least: Only groupings with an objective above this.
    """
    members = sum(kind.count for kind in kinds)
    most_members = most_members or members
    memory = sum(kind.memory_bytes * kind.count for kind in kinds)
    at = micro_batches if callable(micro_batches) else lambda _: micro_batches
    problems = []
    for number in range(1, min(members, most_groups or members) + 1) if groups is None else (groups,):
        if number * model_bytes > memory * (1 + TOLERANCE) or number > members:
            continue
        if not idle and members > number * most_members:
            continue
        problem = _Covering(kinds, model_bytes, number, at(number), idle, most_members)
        problems.append((-number * problem.bound, -number, problem))
    # Something to compare with from the start; the exact search does not depend on it.
    some = problems[:: math.ceil(len(problems) / MAX_DEALT)] if problems else []
    dealt = [grouping for _, _, problem in some if (grouping := problem.deal()) and grouping.objective > least]
    best = max(dealt, key=lambda grouping: grouping.objective, default=None)
    for bound, negative, problem in sorted(problems, key=lambda each: each[:2]):
        reached = max(best.objective if best else 0.0, least)
        if -bound <= reached * (1 + TOLERANCE):
            break
        best = problem.solve(reached / -negative) or best
    return best


class _Covering:
    """D groups, see [Note: the covering problem]."""

    def __init__(
        self,
        kinds: Sequence[GroupingKind],
        model_bytes: float,
        groups: int,
        micro_batches: float,
        idle: bool,
        most_members: int,
    ) -> None:
        self.powers = np.array([kind.power for kind in kinds], dtype=float)
        self.memory = np.array([kind.memory_bytes for kind in kinds], dtype=float)
        self.available = np.array([kind.count for kind in kinds], dtype=np.int64)
        self.model_bytes = model_bytes * (1 - TOLERANCE)
        self.groups = groups
        self.micro_batches = micro_batches
        self.idle = idle
        self.most_members = most_members
        self.bound = self._bound()

    def _bound(self) -> float:
        """No grouping has a larger least power: all groups would be equal, in fractions of members."""
        order = np.argsort(-self.powers)
        members, power = np.cumsum(self.available[order]), np.cumsum((self.available * self.powers)[order])
        best = power * self.micro_batches / (self.groups * (self.micro_batches - 1) + np.maximum(members, self.groups))
        return float(best.max() if self.idle else best[-1])

    def solve(self, above: float) -> Grouping | None:
        """The best grouping whose least power is above ``above``; None if there is none."""
        best = self._cover(max(above, self.bound * TOLERANCE) * (1 + 2 * TOLERANCE))
        if best is None:
            return None
        low, high = best.power, self.bound * (1 + 3 * TOLERANCE)
        values = self._values(low, high)
        while high > low * (1 + 4 * TOLERANCE) and (values is None or len(values)):
            target = (low + high) / 2 if values is None else float(values[len(values) // 2])
            found = self._cover(target)
            if found is not None:
                best, low = found, max(found.power, target)
            else:
                high = target
            if values is not None:
                values = values[(values > low * (1 + TOLERANCE)) & (values < high * (1 - TOLERANCE))]
        return best

    def _values(self, low: float, high: float) -> NDArray[np.float64] | None:
        """The powers that a group can have in this range, ascending; None if there are too many compositions."""
        most = min(self.most_members, int(self.available.sum()) - self.groups + 1)
        caps = np.minimum(self.available, most)
        if np.prod(caps + 1.0) > MAX_VALUES:
            return None
        counts = compositions(caps.tolist(), most)
        counts = counts[counts @ self.memory >= self.model_bytes]
        power = effective_power(counts, self.powers, self.micro_batches)
        return np.unique(power[(power > low * (1 + TOLERANCE)) & (power <= high * (1 + TOLERANCE))])

    def _grouping(self, counts: NDArray[np.int64]) -> Grouping:
        power = float(effective_power(counts, self.powers, self.micro_batches).min())
        return Grouping(tuple(sorted((tuple(row) for row in counts.tolist()), reverse=True)), power)

    def deal(self) -> Grouping | None:
        """Everybody in turn to the group that has least, the largest first; None if a group's memory falls short."""
        counts = np.tile(self.available // self.groups, (self.groups, 1))
        rest = self.available % self.groups
        have = [(0.0, group) for group in range(self.groups)]
        for kind in np.argsort(-self.powers):
            for _ in range(rest[kind]):
                power, group = have[0]
                counts[group, kind] += 1
                heapq.heapreplace(have, (power + float(self.powers[kind]), group))
        members = counts.sum(axis=1)
        if members.min() < 1 or members.max() > self.most_members or (counts @ self.memory).min() < self.model_bytes:
            return None
        return self._grouping(counts)

    def _cover(self, power: float) -> Grouping | None:
        """Groups of at least this power, if there are any."""
        patterns, good = self._patterns(power)
        if not len(patterns) or not self._may_cover(patterns):
            return None
        upper = self.available.astype(float)
        lower = np.where(good | self.idle, 0.0, upper)
        rows = np.concatenate([patterns.T, np.ones((1, len(patterns)))])
        limits = LinearConstraint(csr_array(rows), np.append(lower, self.groups), np.append(upper, self.groups))
        # Few members leave most for others; it also gives the solver a direction.
        found = milp(
            patterns.sum(axis=1), integrality=np.ones(len(patterns)), bounds=Bounds(0, np.inf), constraints=limits
        )
        if found.x is None:
            return None
        times = np.rint(found.x).astype(np.int64)
        counts = np.repeat(patterns, times, axis=0)
        if not self.idle:
            self._add_left_over(counts)
        return self._grouping(counts)

    def _may_cover(self, patterns: NDArray[np.int64]) -> bool:
        """Whether there is enough of everything: each group takes at least what the most modest pattern takes."""
        scales = np.stack([np.ones_like(self.powers), self.powers, self.memory, *np.eye(len(self.powers))])
        least = (patterns @ scales.T).min(axis=0) * self.groups
        return bool((least <= scales @ self.available * (1 + TOLERANCE)).all())

    def _add_left_over(self, counts: NDArray[np.int64]) -> None:
        """Who is left over joins the group with the least power that has room, the strongest first."""
        left = self.available - counts.sum(axis=0)
        for kind in np.argsort(-self.powers):
            for _ in range(left[kind]):
                power = effective_power(counts, self.powers, self.micro_batches)
                counts[np.where(counts.sum(axis=1) < self.most_members, power, np.inf).argmin(), kind] += 1

    def _patterns(self, power: float) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Groups that reach ``power`` and the memory with no good member too many, and which kinds are good."""
        worth = self.powers - power / self.micro_batches
        needed = power * (self.micro_batches - 1) / self.micro_batches
        good = worth >= -1e-12 * self.powers
        if not good.any():
            return np.zeros((0, len(worth)), dtype=np.int64), good
        most = min(self.most_members, int(self.available.sum()) - self.groups + 1)
        caps = np.minimum(self.available, most)
        for kind in np.flatnonzero(good):
            # Of one kind alone no more are needed than make up a group.
            with np.errstate(divide="ignore"):
                alone = max(needed / max(worth[kind], 1e-300), self.model_bytes / max(self.memory[kind], 1e-300), 1.0)
            if not (~good).any() and alone < caps[kind]:
                caps[kind] = int(np.ceil(alone * (1 + TOLERANCE)))
        last = int(np.where(good, caps, -1).argmax())
        others = [kind for kind in range(len(caps)) if kind != last]
        grid = _grid(caps[others].tolist(), most)
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
        return enough & (members >= 1) & (members <= self.most_members) & (counts @ self.memory >= self.model_bytes)


def _grid(caps: Sequence[int], most: int) -> NDArray[np.int64]:
    """All counts up to ``caps`` with at most ``most`` in all, none included: ``[rows, kinds]``."""
    rows = np.zeros((1, 0), dtype=np.int64)
    for cap in caps:
        choice = np.arange(cap + 1)
        rows = np.concatenate([np.repeat(rows, len(choice), axis=0), np.tile(choice, len(rows))[:, None]], axis=1)
        rows = rows[rows.sum(axis=1) <= most]
    return rows
