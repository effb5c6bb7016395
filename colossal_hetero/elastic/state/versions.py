"""How far each rank was when a world broke, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["Agreed", "CatchUp", "Standing", "agree"]


@dataclass(frozen=True)
class Standing:
    """How far a rank is."""

    version: int | None
    """Optimizer steps whose result it holds; None if it holds nothing, as one that has just started."""
    is_complete: bool
    """Whether it has all sums of gradients of the next step, so that it can make this step alone."""
    commit: Any
    """What the ranks agreed on for its last step; None before the first one."""
    evaluations: int = 0
    """Evaluations that all ranks have finished, as far as it knows."""
    has_results: bool | None = None
    """Whether it has the results of the evaluation that it is in; None if it is in none."""


class CatchUp(Enum):
    """What a rank does before it goes on."""

    KEEP = "it has the newest state"
    STEP = "it makes the step that others have made"
    FORGET = "what it holds is too old, or nothing"


@dataclass(frozen=True)
class Agreed:
    """The same on all ranks."""

    version: int
    """Optimizer steps that are done, after each rank has followed its catch_up."""
    commit: Any
    """Of the newest step."""
    catch_ups: tuple[CatchUp, ...]
    """By rank."""


def agree(standings: Sequence[Standing]) -> Agreed | None:
    """Which state counts, and what each rank does.

    A step is made only by ranks that have the commit, and a commit exists only if every rank had complete sums. So a
    rank that is one step behind either is complete, or it was not a member when the others made the step.

    Returns:
        None if no rank holds anything.
    """
    newest = max((each for each in standings if each.version is not None), key=_version, default=None)
    if newest is None:
        return None
    version = _version(newest)

    def catch_up(each: Standing) -> CatchUp:
        if each.version == version:
            return CatchUp.KEEP
        behind = each.version is not None and each.version == version - 1
        return CatchUp.STEP if behind and each.is_complete else CatchUp.FORGET

    return Agreed(version, newest.commit, tuple(map(catch_up, standings)))


def _version(standing: Standing) -> int:
    assert standing.version is not None
    return standing.version
