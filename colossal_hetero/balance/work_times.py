"""A rank's work as a line in its load, and its patience with its own slowness."""

from dataclasses import dataclass

from .ratios import Line

MAX_OVERHEAD = 0.15
"""Largest time that extracting columns, imputing and handling others' units can add, as a share of full products."""
SLOPE_DEVIATION = 0.2
"""Relative standard deviation of the slope from a proportional one: fixed costs, other efficiency at other sizes."""
MIN_SLOPE, MAX_SLOPE = 0.5, 4.0
"""Limits of the slope, relative to a proportional one. They keep one bad measurement from turning the line over."""


@dataclass
class _Visit:
    seconds: float
    movable: float  # the part of ``seconds`` that is in proportion to the load, as far as the clock can tell
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


# [Note: flicker] Each plan that relieves a rank and is withdrawn after a few iterations doubles the rank's patience; a
# long time without a slow spell halves it again (docs/how-it-works.md says why). That a rank has become *faster* is
# always accepted after a few iterations, so flicker costs only a few iterations per :data:`MAX_PATIENCE` slow ones.
# Each rank judges its own slowness.

MAX_PATIENCE = 32  # largest patience in iterations, so that every lasting straggler is balanced at some time
RELAX_AFTER = 100  # iterations without a slow spell after which the patience is halved


class Damping:
    """One rank's patience: the number of slow iterations until it counts as slow."""

    def __init__(self, patience: int) -> None:
        self._min_patience = self.patience = patience
        self._relief = 0.0
        self._relieved_for = 0
        self._calm_for = 0
        # Exchanges are at least patience + 1 iterations apart; a plan withdrawn soon after answered a flicker.
        self._few = 2 * patience + 2

    def observed(self, slow_spell: bool) -> None:
        """Count an iteration; ``slow_spell`` is whether the rank has been slower for the configured patience."""
        self._relieved_for += 1
        self._calm_for = 0 if slow_spell else self._calm_for + 1
        if self._calm_for >= RELAX_AFTER:
            self._calm_for = 0
            self.patience = max(self.patience // 2, self._min_patience)

    def relieved(self, share: float) -> None:
        """Take note of a new plan, in which this rank prunes or gives away ``share`` of its work."""
        if share > 0.0 and share >= 2.0 * self._relief:
            self._relieved_for = 0
        elif share <= 0.5 * self._relief and self._relief > 0.0 and self._relieved_for <= self._few:
            self.patience = max(self._min_patience, min(2 * self.patience, MAX_PATIENCE))
            self._calm_for = 0
        self._relief = share
