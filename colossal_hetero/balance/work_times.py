"""A rank's times at its full share of the work, from times that it measured with another load, for reports."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import mean

from .plan import RankTimes
from .ratios import Line

MAX_OVERHEAD = 0.15
"""Largest time that extracting columns, imputing and handling others' units can add, as a share of full products."""
MIN_RECEIVED = 0.85
"""Shortest time of a load above 1, relative to a proportional time: larger products are more efficient."""
STEADY_ITERATIONS = 8
"""Iterations at one speed from which factors are computed; more would hardly improve them."""


class EqualWork:
    """Scales times that a rank measured at any load to the times of its full share. With a load of ``l`` (1 is the full
    share) products take about ``l`` times as long. The exact factor is measured in the first iterations after the load
    changed, within ``[l, l + MAX_OVERHEAD]``, or ``[MIN_RECEIVED·l, l + MAX_OVERHEAD]`` for a load above 1. If the
    rank's speed changed at about the same time, ``l`` is used."""

    def __init__(self, patience: int) -> None:
        self._load = 1.0
        self._dense: deque[float] = deque(maxlen=patience)
        self._dense_before: float | None = None
        self._calibration: list[float] = []

    def normalize(self, work_seconds: float, matmul_seconds: float, load: float) -> RankTimes:
        """Times at the full share, from an iteration with ``load``, which is 1 − resized − migrated + received."""
        if not load > 0.0:
            raise ValueError(f"load={load} must be above zero: the speed of a rank without work is unknown")
        if load != self._load:
            self._load, self._calibration = load, []
            steady = self._dense and max(self._dense) <= (1.0 + MAX_OVERHEAD) * min(self._dense)
            self._dense_before = mean(self._dense) if steady else None
        if load != 1.0 and self._is_at_the_same_speed(matmul_seconds):
            self._calibration.append(matmul_seconds)
        dense = matmul_seconds / self._share_of_dense_time()
        self._dense.append(dense)
        return RankTimes(work_seconds - matmul_seconds + dense, dense)

    def _is_at_the_same_speed(self, matmul_seconds: float) -> bool:
        if len(self._calibration) >= STEADY_ITERATIONS:
            return False
        return not self._calibration or abs(matmul_seconds / self._calibration[0] - 1.0) <= MAX_OVERHEAD

    def _share_of_dense_time(self) -> float:
        if self._load == 1.0 or not self._dense_before:
            return self._load
        lower = self._load * (MIN_RECEIVED if self._load > 1.0 else 1.0)
        upper = self._load + MAX_OVERHEAD
        share = mean(self._calibration) / self._dense_before
        if not lower / (1.0 + MAX_OVERHEAD) <= share <= upper * (1.0 + MAX_OVERHEAD):
            return self._load
        return min(max(share, lower), upper)


# Work line -----------------------------------------------------------------------------------------------------------

SLOPE_DEVIATION = 0.2
"""Relative standard deviation of the slope from a proportional one: fixed costs, other efficiency at other sizes."""
MIN_SLOPE, MAX_SLOPE = 0.5, 4.0
"""Limits of the slope, relative to a proportional one. They keep one bad measurement from turning the line over."""


@dataclass
class _Visit:
    seconds: float
    movable: float
    """The part of ``seconds`` that is in proportion to the load, as far as the clock can tell."""
    iterations: int


class WorkLine:
    """One rank's work for one kind, as measured at the loads that it has had at its present speed: a line through the
    present load, with the mean of a proportional slope and those to other loads, weighted by their certainty."""

    def __init__(self, full: float) -> None:
        self.full = full
        self._visits: dict[float, _Visit] = {}
        self._load = full

    def measured(self, load: float, seconds: float, movable: float, iterations: int) -> None:
        """Set the work at ``load`` units, which is the present load, by the median of so many iterations."""
        self._load = load
        self._visits[load] = _Visit(seconds, movable, iterations)

    def speed_changed(self, seconds: float, movable: float) -> None:
        """Set the present load's seconds, with ``movable`` of them; other loads change by the same factors."""
        here = self._visits[self._load]
        of_movable = movable / here.movable if here.movable > 0 else 1.0
        fixed = here.seconds - here.movable
        of_fixed = (seconds - movable) / fixed if fixed > 0 else 1.0
        for visit in self._visits.values():
            rest = visit.seconds - visit.movable
            visit.movable *= of_movable
            visit.seconds = visit.movable + rest * of_fixed

    def forget_others(self) -> None:
        """Forget all but the present load: the rank had another speed there."""
        self._visits = {self._load: self._visits[self._load]}

    @property
    def present_seconds(self) -> float:
        return self._visits[self._load].seconds

    def line(self, noise: float, receive_factor: float = 1.0) -> Line:
        """The line through the present load. ``noise`` is the relative standard deviation of one iteration. A unit of
        another rank takes ``receive_factor`` times as long, until that has been measured."""
        here = self._visits[self._load]
        proportional = max(here.movable, 1e-3 * here.seconds) / self._load
        slope = self._slope(proportional, noise)
        # Until a larger load was visited, units beyond the full share cost what the pre-test says.
        visited_above = any(load > self.full for load in self._visits)
        above = slope if visited_above else slope * receive_factor
        return Line(self._load, here.seconds, slope, above, self.full)

    def _slope(self, proportional: float, noise: float) -> float:
        """The mean of the proportional slope and the slopes to other loads, weighted by their inverse variances."""
        here = self._visits[self._load]
        total, weight = proportional, 1.0
        for load, visit in self._visits.items():
            if load == self._load:
                continue
            slope = (here.seconds - visit.seconds) / (self._load - load)
            error = noise * here.seconds * (1 / here.iterations + 1 / visit.iterations) ** 0.5
            deviation = error / abs(self._load - load) / (SLOPE_DEVIATION * proportional)
            certainty = 1.0 / max(deviation * deviation, 1e-4)
            total += certainty * slope
            weight += certainty
        return min(max(total / weight, MIN_SLOPE * proportional), MAX_SLOPE * proportional)


# Damping -------------------------------------------------------------------------------------------------------------
# [Note: flicker] A plan starts some iterations after a rank becomes slow, and ends some iterations after it becomes
# fast again; in these last ones the ranks that received its work are the slow ones. If the rank is slow for only a few
# iterations at a time, a plan made as soon as possible does harm. So each plan that relieves the rank and is withdrawn
# after a few iterations doubles the rank's patience; a long time without a slow spell halves it again. That a rank has
# become *faster* is always accepted after a few iterations, so flicker costs only a few iterations per
# :data:`MAX_PATIENCE` slow ones. Each rank judges its own slowness.

MAX_PATIENCE = 32
"""Largest patience in iterations, so that every lasting straggler is balanced at some time."""
RELAX_AFTER = 100
"""Iterations without a slow spell after which the patience is halved."""


class Damping:
    """One rank's patience: the number of slow iterations until it counts as slow."""

    def __init__(self, patience: int) -> None:
        self._min_patience = patience
        self._patience = patience
        self._relief = 0.0
        self._relieved_for = 0
        self._calm_for = 0
        # Exchanges are at least patience + 1 iterations apart; a plan withdrawn soon after answered a flicker.
        self._few = 2 * patience + 2

    @property
    def patience(self) -> int:
        return self._patience

    def observed(self, slow_spell: bool) -> None:
        """Count an iteration; ``slow_spell`` is whether the rank has been slower for the configured patience."""
        self._relieved_for += 1
        self._calm_for = 0 if slow_spell else self._calm_for + 1
        if self._calm_for >= RELAX_AFTER:
            self._calm_for = 0
            self._patience = max(self._patience // 2, self._min_patience)

    def relieved(self, share: float) -> None:
        """Take note of a new plan, in which this rank prunes or gives away ``share`` of its work."""
        if share > 0.0 and share >= 2.0 * self._relief:
            self._relieved_for = 0
        elif share <= 0.5 * self._relief and self._relief > 0.0 and self._relieved_for <= self._few:
            self._patience = max(self._min_patience, min(2 * self._patience, MAX_PATIENCE))
            self._calm_for = 0
        self._relief = share
