"""The exact minimum of the iteration time over all plans that prune and migrate, including their costs (mode ``auto``).

SEMI divides stragglers into ranks that migrate and ranks that resize; here a rank may do both. See [Note: the optimum]
below.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .costs import Costs
from .plan import BalancePlan, RankTimes

__all__ = ["RESERVE", "optimal_plan"]

RESERVE = 1e-3
"""The minimum share of its work that a rank keeps, so that its speed can still be measured."""

CANDIDATES = 32
"""The number of deadlines that are evaluated directly: those that are best by running sums."""

# [Note: the optimum]
# Every rank's work must be done by a deadline t. A slow rank i with T_i > t prunes a share γ and gives away a share μ,
#     T_i − μ M_i + [γ > 0] Ω1 M_i − (1 − Ω2) γ M_i ≤ t,   γ ≤ γ_max,   γ + μ ≤ 1 − RESERVE,
# and pruning alone does not bring it below T_min. A rank that is early has room for (t − its work) / (Φ2 M_i) of
# others' work; a slow rank may be early because it prunes. For each rank and deadline there are two options: not to
# prune, or to prune as much as is allowed. So the minimum share d_i(t) that rank i gives away, and the maximum share
# c_i(t) that it can take, are each the better one of two piecewise linear functions. Of all deadlines with D(t) = Σ d_i
# ≤ C(t) = Σ c_i we look for the one that minimizes
#     F(t) = t + Φ1(D(t)),   Φ1(0) = 0.
# D decreases and C increases with t, so the feasible deadlines are all those from some point on. F is linear between
# the points where some d_i changes its slope. Its minimum is therefore at one of these points, at the first feasible
# deadline, or at the earliest deadline that can be met without migration.
#
# Without pruning, d_i as t decreases is 0 until T_i, and then has slope −1/M_i until E_i, where all but the reserve is
# given away. With pruning γ̂_i it is 0 until P_i = T_i + Ω1 M_i − (1 − Ω2) γ̂_i M_i, and then has slope −1/M_i until R_i,
# where all but the reserve is pruned or given away. For smaller t the rank prunes less to be able to give away more,
# with slope −1/(Ω2 M_i), until S_i, where it is better not to prune at all.


def optimal_plan(
    times: Sequence[RankTimes],
    costs: Costs,
    max_resize: float,
    straggler_margin: float = 0.0,
) -> BalancePlan:
    """The plan with the shortest predicted iteration time, and of these the one that prunes least.

    Args:
        times: by rank, at equal work.
        costs: the costs of pruning, sending and receiving.
        max_resize: γ_max, the largest share that a rank may prune, in [0, 1).
        straggler_margin: only ranks slower than ``(1 + straggler_margin)·T_min`` prune or give.

    A rank gives or receives, never both. Pruning does not bring a rank below T_min. A slow rank may both prune and
    receive: that is optimal if another rank has reached its pruning limit.
    """
    problem = _Problem(times, costs, max_resize, straggler_margin)
    without = problem.latest
    slope = costs.communication_scale * costs.migrate_seconds_per_share
    deadline, share = problem.best_migrating(slope)
    if share == 0.0:
        note = "no rank has time to spare for others" if problem.slow.any() else "no rank is slow"
        return problem.plan(without, 0.0, f"nothing migrated: {note}")
    seconds = deadline + costs.phi1(share)
    base = min(time.communication_seconds for time in times)
    compared = f"{base + seconds:.3g} s with, {base + without:.3g} s without"
    if seconds >= without:
        return problem.plan(without, 0.0, f"migration cannot pay: {compared}")
    return problem.plan(deadline, share, f"migration pays: {compared}")


class _Problem:
    """The functions d_i and c_i of [Note: the optimum] for all ranks at once."""

    def __init__(self, times: Sequence[RankTimes], costs: Costs, max_resize: float, straggler_margin: float) -> None:
        self.work = np.array([time.work_seconds for time in times])
        self.matmul = np.array([time.matmul_seconds for time in times])
        self.costs = costs
        shortest = self.work.min()
        # Ranks with almost no products neither give nor take anything.
        movable = self.matmul > 1e-6 * self.work
        self.slow = (self.work > (1 + straggler_margin) * shortest) & movable
        self.safe = np.where(movable, self.matmul, 1.0)
        self.gain = 1.0 - costs.resize_per_share
        fixed = costs.resize_fixed
        self.max_ratio = np.zeros(len(times))
        if self.gain > 0 and max_resize > 0:
            to_shortest = ((self.work - shortest) / self.safe + fixed) / self.gain
            ratio = np.minimum(to_shortest, min(max_resize, 1.0 - RESERVE))
            self.max_ratio = np.where(self.slow & (self.gain * ratio > fixed), ratio, 0.0)
        self.prunes = self.max_ratio > 0
        self.pruned_work = self.work + np.where(self.prunes, (fixed - self.gain * self.max_ratio) * self.matmul, 0.0)
        self.full = self.work - (1.0 - RESERVE) * self.matmul
        self.earliest = float(np.where(self.slow, self.full, self.work).max())
        self.latest = float(self.pruned_work.max())
        self.room = np.where(movable, 1.0 / (costs.receive_factor * self.safe), 0.0)

    def largest_ratio(self, deadline: np.ndarray | float) -> np.ndarray:
        """The largest ratio that each rank can prune if it gives away the rest of its excess; negative if none."""
        late = (self.work - deadline) / self.safe + self.costs.resize_fixed
        slack = 1.0 - RESERVE - late
        if self.costs.resize_per_share > 0:
            # The tolerance keeps rounding from forbidding a rank to prune that has just enough room.
            return np.minimum(self.max_ratio, slack / self.costs.resize_per_share + 1e-12)
        return np.where(slack >= -1e-12, self.max_ratio, -1.0)

    def demands(self, deadline: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
        """``d_i`` without pruning, and with pruning (infinite if that is not possible or not better)."""
        plain = np.where(self.slow, np.maximum(self.work - deadline, 0.0) / self.safe, 0.0)
        ratio = self.largest_ratio(deadline)
        late = (self.work - deadline) / self.safe + self.costs.resize_fixed - self.gain * ratio
        pruned = np.where(self.prunes & (ratio > 0), np.maximum(late, 0.0), np.inf)
        return plain, np.where(pruned < plain, pruned, np.inf)

    def demand(self, deadline: np.ndarray | float) -> np.ndarray:
        """D at one deadline, or at each row of deadlines ``[count, 1]``."""
        plain, pruned = self.demands(deadline)
        total: np.ndarray = np.minimum(plain, pruned).sum(axis=-1)
        return total

    def capacity(self, deadline: float) -> float:
        """C at a deadline."""
        return float((np.maximum(deadline - self.pruned_work, 0.0) * self.room).sum())

    def best_migrating(self, slope: float) -> tuple[float, float]:
        """The deadline with ``D > 0`` that minimizes ``t + slope·D``, and D there; D is 0 if there is none."""
        if self.earliest >= self.latest:
            return self.latest, 0.0
        first = self._first_feasible()
        corners, weights, jumps = self._demand_corners()
        inside = (corners > first) & (corners < self.latest)
        candidates = np.append(corners[inside], first)
        if slope > 0 and len(candidates) > CANDIDATES:
            totals = candidates + slope * self._demand_by_sums(candidates, corners, weights, jumps)
            candidates = candidates[np.argpartition(totals, CANDIDATES)[:CANDIDATES]]
        elif slope == 0:
            candidates = candidates[-1:]
        shares = self.demand(candidates[:, None])
        # A smaller share is only rounding.
        moves = shares > 1e-9
        best = int(np.where(moves, candidates + slope * shares, np.inf).argmin())
        return (float(candidates[best]), float(shares[best])) if moves[best] else (self.latest, 0.0)

    def _first_feasible(self) -> float:
        """The earliest deadline with ``D ≤ C``."""
        corners, _, _ = self._demand_corners()
        points = np.unique(np.concatenate([corners, self.pruned_work, [self.earliest, self.latest]]))
        points = points[(points >= self.earliest) & (points <= self.latest)]
        low, high = -1, len(points) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.demand(points[middle]) <= self.capacity(points[middle]):
                high = middle
            else:
                low = middle
        if low < 0:
            return float(points[0])
        # D and C are linear from one point until just before the next one.
        start, half = points[low], 0.5 * (points[high] - points[low])
        lack = self.demand(start) - self.capacity(start)
        lack_half = self.demand(start + half) - self.capacity(start + half)
        if lack_half >= lack:
            return float(points[high])
        return float(min(start + half * lack / (lack - lack_half), points[high]))

    def _demand_corners(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where D changes its slope or jumps: positions, increases of the slope leftwards, heights of the jumps."""
        slow, matmul = self.slow, self.safe
        plain = slow & ~self.prunes
        positions = [self.work[plain]]
        weights = [1.0 / matmul[plain]]
        jumps = [np.zeros(plain.sum())]
        if self.prunes.any():
            per_share, fixed = self.costs.resize_per_share, self.costs.resize_fixed
            m, max_ratio = matmul[self.prunes], self.max_ratio[self.prunes]
            work, late = self.work[self.prunes], self.pruned_work[self.prunes]
            prune_less = self.full[self.prunes] + (fixed + per_share * max_ratio) * m  # R_i
            # S_i: the rank does not prune at all from Ω2·γ left of R_i on, or earlier by what Ω1 amounts to.
            prune_nothing = prune_less - per_share * m * (max_ratio - fixed / self.gain)
            steep = (1.0 / per_share - 1.0) / m if per_share > 0 else np.zeros_like(m)
            drop = np.zeros_like(m) if per_share > 0 else (work - late) / m
            zero = np.zeros_like(m)
            positions += [late, prune_less, prune_nothing]
            weights += [1.0 / m, steep, -steep]
            jumps += [zero, drop, zero]
        return np.concatenate(positions), np.concatenate(weights), np.concatenate(jumps)

    @staticmethod
    def _demand_by_sums(
        deadlines: np.ndarray, corners: np.ndarray, weights: np.ndarray, jumps: np.ndarray
    ) -> np.ndarray:
        """D at many deadlines: ``Σ weight·max(0, corner − t)`` and the jumps right of t. Rounding errors add up."""
        order = np.argsort(-corners)
        corners, weights, jumps = corners[order], weights[order], jumps[order]
        count = np.searchsorted(-corners, -deadlines, side="left")
        sums = [np.concatenate([[0.0], np.cumsum(each)]) for each in (weights, weights * corners, jumps)]
        total: np.ndarray = sums[1][count] - deadlines * sums[0][count] + sums[2][count]
        return total

    def plan(self, deadline: float, share: float, note: str) -> BalancePlan:
        """The plan that meets ``deadline`` with ``share`` given away in total, and prunes as little as possible."""
        resize, migrate = np.zeros(len(self.work)), np.zeros(len(self.work))
        late = self.slow & (self.work > deadline)
        if share > 0:
            plain, pruned = self.demands(deadline)
            chosen = late & (pruned < plain)
            migrate = np.where(chosen, pruned, plain)
            limit = self.largest_ratio(deadline)
        else:
            chosen, limit = late & self.prunes, self.max_ratio
        fixed = self.costs.resize_fixed
        if chosen.any():
            needed = ((self.work - deadline) / self.safe + fixed) / self.gain
            resize = np.where(chosen, np.where(migrate > 0, limit, np.minimum(needed, limit)), 0.0)
        receive = np.zeros(len(self.work))
        if share > 0:
            early = np.where(late, 0.0, np.maximum(deadline - self.work, 0.0) * self.room)
            # At the first feasible deadline both are equal up to rounding.
            if early.sum() < share * (1.0 - 1e-12):
                early, resize = self._make_room(deadline, share, early, resize, migrate)
            receive = early * (migrate.sum() / early.sum())
        return BalancePlan(tuple(resize.tolist()), tuple(migrate.tolist()), tuple(receive.tolist()), note)

    def _make_room(
        self, deadline: float, share: float, early: np.ndarray, resize: np.ndarray, migrate: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Let slow ranks, one after the other, prune more than they need until there is room for ``share``."""
        early, resize = early.copy(), resize.copy()
        capacity = np.maximum(deadline - self.pruned_work, 0.0) * self.room
        able = np.flatnonzero(self.prunes & (migrate == 0) & (capacity > early))
        # First the ranks that prune in any case and have paid the fixed cost, then those that gain the most room.
        for rank in sorted(able, key=lambda rank: (resize[rank] == 0, early[rank] - capacity[rank], rank)):
            lacking = share - early.sum()
            if lacking <= 0:
                break
            room = min(early[rank] + lacking, capacity[rank])
            seconds = self.work[rank] - deadline + room / self.room[rank]
            resize[rank] = min(
                (seconds / self.matmul[rank] + self.costs.resize_fixed) / self.gain, float(self.max_ratio[rank])
            )
            early[rank] = room
        return early, resize
