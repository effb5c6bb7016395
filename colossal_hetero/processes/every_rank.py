"""What each rank does by itself, and all of them hear the end of."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["destroy_groups", "on_every_rank"]

SETTLE_SECONDS = 0.2

T = TypeVar("T")


def on_every_rank(function: Callable[[], T], purpose: str) -> list[T]:
    """What ``function``, in which there is no collective, returned on each rank.

    Raises:
        RuntimeError: on every rank, if it raised on any; it says on which, and what. So none waits for the other.
    """
    failure: Exception | None = None
    outcome: tuple[Any, str | None]
    try:
        outcome = function(), None
    except Exception as error:
        failure, outcome = error, (None, f"{type(error).__name__}: {error}")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, outcome)
    failures = [f"rank {rank}: {words}" for rank, (_, words) in enumerate(everyone) if words is not None]
    if failures:
        raise RuntimeError(f"{purpose} failed on {'; '.join(failures)}") from failure
    return [value for value, _ in everyone]


def destroy_groups() -> None:
    """``torch.distributed.destroy_process_group``, with Gloo left a moment to put away its last collective.

    Gloo's threads drop the tensors of a collective when it is over for the caller already, for which they need the
    interpreter. A group's destructor waits for these threads and (in torch 2.5) does not let go of the interpreter
    meanwhile: if one of them is late, both wait for ever.
    """
    time.sleep(SETTLE_SECONDS)
    dist.destroy_process_group()
