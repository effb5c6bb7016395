"""The exact minimum of the iteration time over all plans that prune and migrate, including their costs (mode ``auto``).
In SEMI a straggler migrates or resizes; here it may do both. See [Note: the optimum]."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from .plan import BalancePlan, Costs, RankTimes, predicted_seconds
from .ratios import resize_ratios

RESERVE = 1e-3  # minimum share of its work that a rank keeps, so that its speed can still be measured

# [Note: the optimum] (docs/algorithms.md, 1.6) Of all deadlines t with ``D(t) = Σ d_i(t) ≤ C(t) = Σ c_i(t)``, what
# ranks have to give away and have room for, the one is taken that minimizes ``t + Φ1(D(t))``. D decreases and C
# increases with t, and both are piecewise linear, so only their corners and the first feasible deadline are tried.


def optimal_plan(
    times: Sequence[RankTimes], costs: Costs, max_resize: float, straggler_margin: float = 0.0
) -> BalancePlan:
    """The plan with the shortest predicted iteration time, and of these the one that prunes least, no rank below T_min.
    A rank gives or receives, never both; it may both prune and receive if another one has reached its limit."""
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
        return float((np.maximum(deadline - self.pruned_work, 0.0) * self.room).sum())

    def best_migrating(self, slope: float) -> tuple[float, float]:
        """The deadline with ``D > 0`` that minimizes ``t + slope·D``, and D there; D is 0 if there is none."""
        if self.earliest >= self.latest:
            return self.latest, 0.0
        first = self._first_feasible()
        corners = self._demand_corners()
        inside = (corners > first) & (corners < self.latest)
        candidates = np.append(corners[inside], first) if slope > 0 else np.array([first])
        shares = self.demand(candidates[:, None])
        # A smaller share is only rounding.
        moves = shares > 1e-9
        best = int(np.where(moves, candidates + slope * shares, np.inf).argmin())
        return (float(candidates[best]), float(shares[best])) if moves[best] else (self.latest, 0.0)

    def _first_feasible(self) -> float:
        """The earliest deadline with ``D ≤ C``."""
        points = np.unique(np.concatenate([self._demand_corners(), self.pruned_work, [self.earliest, self.latest]]))
        points = points[(points >= self.earliest) & (points <= self.latest)]
        first = bisect_left(
            points, True, hi=len(points) - 1, key=lambda point: bool(self.demand(point) <= self.capacity(point))
        )
        if first == 0:
            return float(points[0])
        # D and C are linear from one point until just before the next one.
        start, end = points[first - 1 : first + 1]
        half = 0.5 * (end - start)
        lack = self.demand(start) - self.capacity(start)
        lack_half = self.demand(start + half) - self.capacity(start + half)
        if lack_half >= lack:
            return float(end)
        return float(min(start + half * lack / (lack - lack_half), end))

    def _demand_corners(self) -> np.ndarray:
        """Deadlines at which D jumps or changes its slope."""
        plain = self.work[self.slow & ~self.prunes]
        if not self.prunes.any():
            return plain
        per_share, fixed = self.costs.resize_per_share, self.costs.resize_fixed
        m, max_ratio = self.safe[self.prunes], self.max_ratio[self.prunes]
        prune_less = self.full[self.prunes] + (fixed + per_share * max_ratio) * m  # R_i
        # S_i: the rank does not prune at all from Ω2·γ left of R_i on, or earlier by what Ω1 amounts to.
        prune_nothing = prune_less - per_share * m * (max_ratio - fixed / self.gain)
        return np.concatenate([plain, self.pruned_work[self.prunes], prune_less, prune_nothing])

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


# Semi ----------------------------------------------------------------------------------------------------------------


def semi_plan(
    times: Sequence[RankTimes], costs: Costs, max_resize: float, straggler_margin: float = 0.0
) -> BalancePlan:
    """The plan of Algorithm 2: a single straggler splits its excess by Eq. 2; of several, the slowest migrate and the
    others resize. Of all numbers up to the maximum of Eq. 3, the one with the shortest predicted time migrates, because
    Eq. 3 compares migrating with doing nothing, not with resizing: in Fig. 11 at least one straggler too many migrates.
    Line 8 of the printed algorithm has a misprint: the branch is that of the straggler, ``T_i > T_min``."""
    slowest = _stragglers(times, straggler_margin)
    if not slowest:
        return BalancePlan.idle(len(times), "no rank is slow")
    if len(slowest) > 1:
        max_migrating = migrating_stragglers(times, costs, slowest)
        # Of equally fast divisions it is the one that prunes least.
        divisions = [
            divide_stragglers(times, slowest[:count], slowest, max_resize) for count in range(max_migrating, -1, -1)
        ]
        return min(divisions, key=lambda plan: predicted_seconds(times, costs, plan))
    (slow,) = slowest
    resized, migrated = resize_and_migrate(times, costs, slow, max_resize)
    taken = migrated / (len(times) - 1)
    return BalancePlan(
        resize=tuple(resized if rank == slow else 0.0 for rank in range(len(times))),
        migrate=tuple(migrated if rank == slow else 0.0 for rank in range(len(times))),
        receive=tuple(0.0 if rank == slow else taken for rank in range(len(times))),
        note=f"Eq. 2: the straggler migrates {migrated:.0%} of its work and prunes {resized:.0%}",
    )


def resize_and_migrate(times: Sequence[RankTimes], costs: Costs, slow: int, max_resize: float) -> tuple[float, float]:
    """``(γ(1−β), γβ)`` for the only straggler: the shares that it prunes and migrates (Eq. 2), clipped to possible
    ones. β makes the straggler's cost of resizing equal to the slowest receiver's cost of migrating, ``Ω1 + Ω2(γ(1−β))
    = Φ1(γβ) + Φ2(γβ/(e−1))``, in which all terms are affine in β."""
    matmul = times[slow].matmul_seconds
    excess = float(_excess(times)[slow])
    receiver = max(time.matmul_seconds for rank, time in enumerate(times) if rank != slow)
    resizing_all = (costs.resize_fixed + costs.resize_per_share * excess) * matmul
    fixed = costs.communication_scale * costs.migrate_fixed_seconds
    per_share = (
        costs.resize_per_share * matmul
        + costs.communication_scale * costs.migrate_seconds_per_share
        + costs.phi2(1.0, receiver) / (len(times) - 1)
    )
    lead = resizing_all - fixed
    migrated = excess if lead >= per_share * excess else max(lead, 0.0) / per_share
    migrated = max(migrated, excess - max_resize)
    return excess - migrated, migrated


def migrating_stragglers(times: Sequence[RankTimes], costs: Costs, slowest: Sequence[int]) -> int:
    """Number of stragglers, ``slowest`` first, that migrate (Eq. 3): the largest x up to which all f are positive.

    ``f(x) = (T_(x) − T_min) − Φ1(Γ(x)) − Φ2(Γ(x)/(e − z))``, with ``Γ(x) = Σ_{k≤x} (T_(k) − T_min)/M_(k)`` and the
    slowest receiver's Φ2. Unlike in the printed equation, M is in the denominators, because only that part of T can
    move; and receivers are the ``e − z`` ranks that are no stragglers: the ``z − x`` that resize would be late again.
    """
    work = np.array([time.work_seconds for time in times])
    excess = _excess(times)
    receivers = sorted(set(range(len(times))).difference(slowest))
    receiver = max(times[rank].matmul_seconds for rank in receivers)
    moved = 0.0
    for x, rank in enumerate(slowest):
        moved += float(excess[rank])
        saved = float(work[rank] - work.min())
        if saved - costs.phi1(moved) - costs.phi2(moved / len(receivers), receiver) <= 0.0:
            return x
    return len(slowest)


def divide_stragglers(
    times: Sequence[RankTimes], migrating: Sequence[int], stragglers: Sequence[int], max_resize: float
) -> BalancePlan:
    """The plan in which the ranks ``migrating`` give away their excess, and the other ``stragglers`` prune theirs up to
    ``max_resize``. All other ranks receive equal shares (Algorithm 2, lines 20 to 24)."""
    excess = _excess(times)
    resize, migrate, receive = (np.zeros(len(times)) for _ in range(3))
    resizing = sorted(set(stragglers).difference(migrating))
    receivers = sorted(set(range(len(times))).difference(stragglers))
    resize[resizing] = np.minimum(excess[resizing], max_resize)
    migrate[list(migrating)] = excess[list(migrating)]
    receive[receivers] = migrate.sum() / len(receivers)
    return BalancePlan(
        resize=tuple(resize.tolist()),
        migrate=tuple(migrate.tolist()),
        receive=tuple(receive.tolist()),
        note=f"Eq. 3: of {len(stragglers)} stragglers {len(migrating)} migrate and {len(resizing)} resize",
    )


def _stragglers(times: Sequence[RankTimes], margin: float) -> list[int]:
    """Ranks slower than ``(1 + margin)·T_min`` that have work to move, the slowest first."""
    work = [time.work_seconds for time in times]
    slow_from = (1 + margin) * min(work)
    slow = [rank for rank, time in enumerate(times) if work[rank] > slow_from and time.matmul_seconds > 0]
    return sorted(slow, key=lambda rank: (-work[rank], rank))


def _excess(times: Sequence[RankTimes]) -> np.ndarray:
    """γ of Eq. 1 with T_min: the share of its work that makes each rank late, at most 1 − RESERVE; ``[ranks]``."""
    work = np.array([time.work_seconds for time in times])
    return resize_ratios(work, [time.matmul_seconds for time in times], float(work.min()), 1.0 - RESERVE)
