"""How long a rank must be slower before that is believed: longer, if it comes and goes.

[Note: flicker] A plan answers a straggler some iterations late and, worse, outlasts it for some: ranks that received
its work are then the slow ones. Against one that comes and goes every few iterations, a plan made as soon as possible
is in force just when it harms. So that a rank flickers is learnt from plans: each one that relieves it, and is taken
back after few iterations, doubles the patience with it; long calm halves it again. That a rank is *faster* is believed
after few iterations always, so a plan that has become harmful goes at once, and flicker of any kind costs a few
iterations per :data:`MAX_PATIENCE` slow ones.

Nothing of this is shared between ranks: each judges its own slowness, and until it believes in it, it reports the
speed that it had before.
"""

from __future__ import annotations

__all__ = ["MAX_PATIENCE", "RELAX_AFTER", "Damping"]

MAX_PATIENCE = 32
"""Iterations after which any straggler is answered, however it behaved before."""

RELAX_AFTER = 100
"""Iterations without a slow spell after which patience halves."""


class Damping:
    """One rank's patience with its own slowness; pure."""

    def __init__(self, patience: int) -> None:
        self._least = patience
        self._patience = patience
        self._relief = 0.0
        self._relieved_for = 0
        self._calm_for = 0
        # From one exchange to the next it takes patience and one iteration; a plan that lived for hardly longer than
        # that was wrong from the start.
        self._few = 2 * patience + 2

    @property
    def patience(self) -> int:
        """Consecutive slower iterations that must agree before the rank is believed to be slower."""
        return self._patience

    def observed(self, slow_spell: bool) -> None:
        """An iteration is over; whether the rank has been slower than believed for as long as the least patience."""
        self._relieved_for += 1
        self._calm_for = 0 if slow_spell else self._calm_for + 1
        if self._calm_for >= RELAX_AFTER:
            self._calm_for = 0
            self._patience = max(self._patience // 2, self._least)

    def relieved(self, share: float) -> None:
        """A plan was decided by which others or nobody do ``share`` of this rank's work."""
        if share > 0.0 and share >= 2.0 * self._relief:
            self._relieved_for = 0
        elif share <= 0.5 * self._relief and self._relief > 0.0 and self._relieved_for <= self._few:
            self._patience = max(self._least, min(2 * self._patience, MAX_PATIENCE))
            self._calm_for = 0
        self._relief = share
