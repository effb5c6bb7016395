"""How near to the best possible plan a search is, and whether that is near enough."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from .iteration_bound import IterationBound
from .work_bound import WorkBound

__all__ = ["PLAIN", "Effort", "GapGoal"]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is done to find a plan, and to prove how good it is.

    Raises:
        ValueError: A number is negative.
    """

    bound_seconds: float = 0.0
    """Time to find a lower bound, in seconds; 0: none is looked for."""
    gap: float | None = None
    """The search ends when no plan can be faster by more than this share (0.03: 3 %); None: it does not end early."""
    search_seconds: float = np.inf
    """No part of the search begins after this, once there is a plan."""
    quick: bool = False
    """Whether less is tried: exchanges of slots are not repeated from random others, fewer plans have slots moved and
    other orders of stages tried, and fewer orders are."""

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
    """The lower bound of one search, which is looked for only as far as needed."""

    bound: IterationBound | WorkBound
    effort: Effort
    _begin: float = field(default_factory=time.monotonic)
    _spent: float = 0.0

    def is_enough(self, seconds: float) -> bool:
        """Whether the search may end with a plan of this time."""
        if time.monotonic() - self._begin > self.effort.search_seconds:
            return True
        if self.effort.gap is None:
            return False
        enough = seconds / (1.0 + self.effort.gap)
        return self._lower_bound(seconds, enough) >= enough

    def lower_bound(self, seconds: float) -> float:
        """A time that no plan is below, at most ``seconds``, the time of the fastest plan that was found."""
        return self._lower_bound(seconds, np.inf)

    def _lower_bound(self, seconds: float, enough: float) -> float:
        begin = time.monotonic()
        left = max(self.effort.bound_seconds - self._spent, 0.0)
        found = self.bound.seconds(seconds, enough=enough, time_limit_seconds=left)
        self._spent += time.monotonic() - begin
        return found
