"""Notice when this rank enters and leaves a collective of ``torch.distributed``, where it may wait for other ranks.

Collectives are watched if they are called as attributes of ``torch.distributed``, by the training script or by ZeRO's
optimizer, FSDP and ``SyncBatchNorm``. ``DistributedDataParallel`` sums gradients in C++; that is not seen here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

__all__ = ["WaitListener", "tell_waits"]

COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
)


class WaitListener(Protocol):
    """Is told about this rank's collectives."""

    def before_collective(self, group: dist.ProcessGroup | None) -> bool:
        """A collective of ``group`` begins; whether :meth:`after_collective` is to be called at its end."""

    def after_collective(self) -> None:
        """The collective has ended, or what was left of one that was started before."""


_listener: WaitListener | None = None


def tell_waits(listener: WaitListener | None) -> None:
    """Tell ``listener`` about collectives from now on, and nobody else; None: nobody."""
    global _listener
    _listener = listener
    if listener is not None:
        for name in COLLECTIVES:
            function = getattr(dist, name, None)
            if function is not None and not hasattr(function, "tells_waits"):
                setattr(dist, name, _told(function))


class _ToldWork:
    """A collective that has been started: waiting for it is told."""

    def __init__(self, work: Any, group: dist.ProcessGroup | None) -> None:
        self._work, self._group = work, group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        listener = _listener
        if listener is None or not listener.before_collective(self._group):
            return self._work.wait(*args, **kwargs)
        try:
            return self._work.wait(*args, **kwargs)
        finally:
            listener.after_collective()


def _told(collective: Callable[..., Any]) -> Callable[..., Any]:
    """``collective``, which tells the listener."""
    parameters = list(inspect.signature(collective).parameters)
    place = parameters.index("group")

    @functools.wraps(collective)
    def run(*args: Any, **kwargs: Any) -> Any:
        listener = _listener
        group = kwargs.get("group", args[place] if len(args) > place else None)
        if listener is None or not listener.before_collective(group):
            return collective(*args, **kwargs)
        try:
            work = collective(*args, **kwargs)
        finally:
            listener.after_collective()
        return work if work is None else _ToldWork(work, group)

    run.tells_waits = True  # type: ignore[attr-defined]
    return run
