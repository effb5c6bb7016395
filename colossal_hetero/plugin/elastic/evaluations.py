"""Evaluations in elastic training: all ranks know that all have finished one before any of them goes on.

[Note: evaluations] An evaluation has no commit, so a message at its end keeps replicas together, as the commit does for
steps. If a member is lost, a rank is either in the evaluation that others are in, or one ahead of them, because it has
got the message of this one; then all have its results, and ranks that are behind go on with them. The others evaluate
their batch again, unless all are in the same evaluation and have its results. A process that joins meanwhile is in no
evaluation, and would train alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...elastic.held_layers import Standing


class Evaluations:
    done = 0  # evaluations that all ranks have finished, as far as this rank knows
    has_results: bool | None = None  # of the passes of the present evaluation; None outside

    def run(
        self,
        evaluate: Callable[[Iterator[Any]], dict],
        batches: Iterator[Any],
        change: Callable[[RuntimeError], bool],
    ) -> dict:
        """Evaluate the next batch; returns what ``evaluate`` returns."""
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
    furthest = max(each.evaluations for each in standings)
    if own.has_results is None or own.evaluations < furthest:
        return False
    return not all(each.has_results and each.evaluations == furthest for each in standings)


def is_joined_inside(standings: Sequence[Standing]) -> bool:
    """True if ranks of the new world are in an evaluation, and others have just joined, which are not."""
    has_new = any(each.version is None for each in standings)
    return has_new and any(each.version is not None and each.has_results is not None for each in standings)


def _drawing(batches: Iterator[Any], drawn: list[Any]) -> Iterator[Any]:
    yield from tuple(drawn)
    for batch in batches:
        drawn.append(batch)
        yield batch
