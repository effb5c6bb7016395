"""Run a function on every rank and exchange its results or errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from .ended_ranks import naming_ended_ranks

__all__ = ["on_every_rank"]

T = TypeVar("T")


def on_every_rank(function: Callable[[], T], purpose: str) -> list[T]:
    """Call ``function`` on every rank; its results, by rank. ``function`` must not call collectives.

    Raises:
        RuntimeError: on every rank, if ``function`` raised on any rank, so that no rank waits for another. The message
            begins with ``purpose`` and names the ranks and their errors. If the process of a rank has ended, the
            message names that rank.
    """
    failure: Exception | None = None
    outcome: tuple[Any, str | None]
    try:
        outcome = function(), None
    except Exception as error:
        failure, outcome = error, (None, f"{type(error).__name__}: {error}")
    everyone: list[Any] = [None] * dist.get_world_size()
    with naming_ended_ranks():
        dist.all_gather_object(everyone, outcome)
    failures = [f"rank {rank}: {words}" for rank, (_, words) in enumerate(everyone) if words is not None]
    if failures:
        raise RuntimeError(f"{purpose} failed on {'; '.join(failures)}") from failure
    return [value for value, _ in everyone]
