"""Evaluations in elastic training: all ranks know that all have finished one before any of them goes on.

[Note: evaluations] An evaluation has no commit, so replicas that are not slowed down by others would run ahead. A
message at its end keeps them together, as the commit does for steps. If a member is lost, a rank is either in the
evaluation that others are in, or one ahead of them, because it has got the message of this one; then all have its
results. So ranks that are behind go on with their results. The others evaluate their batch again, unless all are in the
same evaluation and have its results. A process that joins meanwhile is in no evaluation, and would train alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from ...elastic.state.versions import Standing

__all__ = ["Evaluations", "has_to_repeat", "is_joined_inside"]


class Evaluations:
    """Counts the evaluations of a rank; see [Note: evaluations]."""

    def __init__(self) -> None:
        self.done = 0
        """Evaluations that all ranks have finished, as far as this rank knows."""
        self.has_results: bool | None = None
        """Whether this rank has finished the passes of the evaluation that it is in; None if it is in none."""

    def run(
        self,
        evaluate: Callable[[Iterator[Any]], dict],
        batches: Iterator[Any],
        change: Callable[[RuntimeError], bool],
    ) -> dict:
        """Evaluate the next batch.

        Args:
            evaluate: runs the passes of a batch.
            batches: where it is drawn from.
            change: goes on in a new world after an error; whether the batch has to be evaluated again.

        Returns:
            what ``evaluate`` returns.
        """
        drawn: list[Any] = []
        result: dict = {}
        self.has_results = False
        while True:
            try:
                if not self.has_results:
                    result = evaluate(_drawing(batches, drawn))
                    self.has_results = True
                dist.barrier()
                break
            except RuntimeError as error:
                failure = error
            with torch.inference_mode(False), torch.enable_grad():
                self.has_results = not change(failure)
            if self.has_results:
                break
        self.done, self.has_results = self.done + 1, None
        return result


def has_to_repeat(own: Standing, standings: Sequence[Standing]) -> bool:
    """Whether a rank has to evaluate again what it is evaluating.

    Args:
        own: of the rank.
        standings: of all ranks of the new world that were in the world before.
    """
    furthest = max(each.evaluations for each in standings)
    if own.has_results is None or own.evaluations < furthest:
        return False
    return not all(each.has_results and each.evaluations == furthest for each in standings)


def is_joined_inside(standings: Sequence[Standing]) -> bool:
    """Whether ranks of the new world are in an evaluation, and others have just joined, which are not.

    Args:
        standings: of all ranks of the new world.
    """
    has_new = any(each.version is None for each in standings)
    return has_new and any(each.version is not None and each.has_results is not None for each in standings)


def _drawing(batches: Iterator[Any], drawn: list[Any]) -> Iterator[Any]:
    """The batches that were drawn before, then the next ones, which are noted."""

    def new() -> Iterator[Any]:
        for batch in batches:
            drawn.append(batch)
            yield batch

    return chain(tuple(drawn), new())
