"""For how many iterations a rank must be slower before it counts as slow: longer if its speed flickers.

[Note: flicker] A plan for a straggler starts some iterations after the rank becomes slow, and ends some iterations
after it becomes fast again. In these last iterations the ranks that received its work are the slow ones. If the rank is
slow for only a few iterations at a time, a plan made as soon as possible would be in use just when it does harm.
Flicker is learned from plans: each plan that relieves the rank and is withdrawn after a few iterations doubles the
rank's patience; a long time without a slow spell halves it again. That a rank has become *faster* is always accepted
after a few iterations, so a harmful plan ends quickly, and any kind of flicker costs only a few iterations per
:data:`MAX_PATIENCE` slow ones.

Ranks do not share this state. Each rank judges its own slowness, and reports its earlier speed until it counts as slow.
"""

from __future__ import annotations

__all__ = ["MAX_PATIENCE", "RELAX_AFTER", "Damping"]

MAX_PATIENCE = 32
"""The largest patience in iterations, so that every lasting straggler is balanced at some time."""

RELAX_AFTER = 100
"""Iterations without a slow spell after which the patience is halved."""


class Damping:
    """One rank's patience: how many slow iterations it takes until the rank counts as slow."""

    def __init__(self, patience: int) -> None:
        self._min_patience = patience
        self._patience = patience
        self._relief = 0.0
        self._relieved_for = 0
        self._calm_for = 0
        # Two exchanges are at least patience + 1 iterations apart. A plan that is withdrawn soon after that answered a
        # flicker.
        self._few = 2 * patience + 2

    @property
    def patience(self) -> int:
        """Consecutive slower iterations after which the rank counts as slower."""
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
