"""What a rank's work for the layers of one kind takes: a line in its columns or units, learned from visited loads."""

from __future__ import annotations

from dataclasses import dataclass

from .whole_units import Line

__all__ = ["WorkLine"]

SLOPE_DEVIATION = 0.2
"""How far the slope may be from a proportional one, as a relative standard deviation: fixed costs of a product, better
or worse efficiency at another size."""

MIN_SLOPE, MAX_SLOPE = 0.5, 4.0
"""Limits of the slope, relative to a proportional one. They keep one bad measurement from turning the line over."""


@dataclass
class _Visit:
    """What was measured at one load."""

    seconds: float
    movable: float
    """The part of ``seconds`` that is in proportion to the load, as far as the clock can tell."""
    iterations: int


class WorkLine:
    """Work of one rank for one kind, as measured at the loads that it has had at its present speed.

    Between loads it is a line through the present load. Its slope combines two sources: that products take time in
    proportion to their size, and the difference from other loads; both are weighted by how certain they are.

    Args:
        full: the rank's full share in units.
    """

    def __init__(self, full: float) -> None:
        self.full = full
        self._visits: dict[float, _Visit] = {}
        self._load = full

    def measured(self, load: float, seconds: float, movable: float, iterations: int) -> None:
        """Set what work takes at ``load`` units, which is the present load, by the median of so many iterations."""
        self._load = load
        self._visits[load] = _Visit(seconds, movable, iterations)

    def speed_changed(self, seconds: float, movable: float) -> None:
        """The present load now takes ``seconds``, of which ``movable`` are in proportion to it.

        At all other loads both parts change by the same factors.
        """
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
        """What was measured at the present load."""
        return self._visits[self._load].seconds

    def line(self, noise: float, receive_factor: float = 1.0) -> Line:
        """The line through the present load.

        ``noise`` is the relative standard deviation of one iteration, ``receive_factor`` how many times as long a unit
        of another rank takes, which counts until that has been measured.
        """
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
