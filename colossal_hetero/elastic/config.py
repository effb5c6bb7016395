"""The user's options for elastic training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ElasticConfig"]


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """When training goes on with the members that are left, and how long ranks wait for each other."""

    min_members: int = 1
    """With fewer processes, training waits for others."""

    max_members: int | None = None
    """More processes wait, as spares, until one leaves. None: no limit."""

    notice_file: str | Path | None = None
    """A file that appears when this machine is going to be taken away; SIGTERM says the same."""

    measure: Callable[[], Any] | None = None
    """Measures the model's layers on the device of this process, if the profile does not have its kind: a function that
    returns a ``ModelProfile``, such as ``lambda: profile_layers(make_model(), batch, criterion).profile``. It is called
    before the process joins. None: such a process is refused."""

    dead_seconds: float = 2.0
    """A member of which nothing was heard for so long counts as dead."""

    last_call_seconds: float = 1.0
    """So long a world that could form waits for more members."""

    timeout_seconds: float = 60.0
    """Time limit of a collective operation. A member that hangs longer counts as dead."""

    start_seconds: float = 0.0
    """So long the first world waits for ``max_members`` (without it: for all devices of the cluster file), so that they
    need not join one after the other."""

    join_seconds: float = 600.0
    """So long a member waits for a world, for example for ``min_members`` or for devices that can hold the model."""

    def __post_init__(self) -> None:
        if isinstance(self.min_members, bool) or not isinstance(self.min_members, int) or self.min_members < 1:
            raise ValueError(f"min_members={self.min_members!r} must be a whole number of at least 1")
        if self.max_members is not None and self.max_members < self.min_members:
            raise ValueError(f"max_members={self.max_members} is less than min_members={self.min_members}")
        if self.measure is not None and not callable(self.measure):
            raise TypeError(f"measure={self.measure!r} is not a function that measures the layers")
        if not self.start_seconds >= 0:
            raise ValueError(f"start_seconds={self.start_seconds!r} must be at least 0")
        for name in ("dead_seconds", "last_call_seconds", "timeout_seconds", "join_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a positive number of seconds")
