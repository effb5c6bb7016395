"""Distance of a search from the best possible plan, and the decision to end it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from .iteration_bound import IterationBound

__all__ = ["PLAIN", "Effort", "GapGoal"]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Effort to find a plan, and to prove how good it is."""

    bound_seconds: float = 0.0
    """Time limit for a lower bound; 0: none is looked for."""
    gap: float | None = None
    """The search ends when no plan can be faster by more than this share (0.03: 3 %); None: it does not end early."""
    search_seconds: float = np.inf
    """No part of the search begins after this, once there is a plan."""

    def __post_init__(self) -> None:
        for name in ("bound_seconds", "gap", "search_seconds"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name}={value}: must be at least 0")
        if self.gap is not None and self.bound_seconds == 0:
            raise ValueError(f"gap={self.gap} without time to find a bound; give bound_seconds, such as 5")


PLAIN = Effort()
"""The whole search, and no bound."""


@dataclass(eq=False)
class GapGoal:
    """Lower bound of one search, which is looked for only as far as needed."""

    bound: IterationBound
    effort: Effort
    _begin: float = field(default_factory=time.monotonic)
    _spent: float = 0.0

    def is_enough(self, seconds: float) -> bool:
        if time.monotonic() - self._begin > self.effort.search_seconds:
            return True
        if self.effort.gap is None:
            return False
        enough = seconds / (1.0 + self.effort.gap)
        return self._lower_bound(seconds, enough) >= enough

    def lower_bound(self, seconds: float) -> float:
        """Seconds that no plan is below, at most ``seconds``, the time of the fastest plan that was found."""
        return self._lower_bound(seconds, np.inf)

    def _lower_bound(self, seconds: float, enough: float) -> float:
        begin = time.monotonic()
        left = max(self.effort.bound_seconds - self._spent, 0.0)
        found = self.bound.seconds(seconds, enough=enough, time_limit_seconds=left)
        self._spent += time.monotonic() - begin
        return found
