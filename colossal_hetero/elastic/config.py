"""Options of elastic training."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..common.methods import with_checked_names

LAST_CALL_SECONDS = {"in-process": 1.0, "restart": 30.0}


@with_checked_names
@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Recovery from lost members, numbers of members, and time limits of elastic training."""

    recovery: Literal["in-process", "restart"] = "in-process"
    """Way of recovery. "in-process": the same processes form another group. "restart": all processes end when one is
    lost, and torchrun starts them again."""
    memory: str | Path | None = None
    """Folder in each node's memory that outlives processes, for "restart". None: ``/dev/shm/colossal_hetero-UID``."""
    memory_every: int = 1
    """Steps after which the state is written there although nothing happens, for "restart"."""
    min_members: int = 1
    """Smallest number of processes that train; fewer wait for others."""
    max_members: int | None = None
    """Largest number of processes that train; more wait as spares. None: as many as the cluster file has devices."""
    notice_file: str | Path | None = None
    """A file that appears when this machine is going to be taken away; SIGTERM says the same."""
    dead_seconds: float = 2.0
    """Silence after which a member counts as dead."""
    last_call_seconds: float | None = None
    """Time that a world that could form waits for more members. None: 1 s, and with ``recovery="restart"`` 30 s,
    because processes that start again take different times."""
    timeout_seconds: float = 60.0
    """Time limit of a collective operation. A member that hangs longer counts as dead."""
    start_seconds: float = 0.0
    """Time that the first world waits for ``max_members``, so that they need not join one after the other."""
    join_seconds: float = 600.0
    """Time that a member waits for a world, for example for ``min_members`` or for devices that can hold the model."""
    seed: int = 0
    """Seed of random numbers in the model, such as dropout, which depend only on it, the step, the micro-batch and the
    block. That of data augmentation is ``seed`` of ``plugin.prepare_dataloader``."""

    def __post_init__(self) -> None:
        if self.recovery not in ("in-process", "restart"):
            raise ValueError(f'recovery={self.recovery!r} must be "in-process" or "restart"')
        if self.recovery == "in-process" and (self.memory is not None or self.memory_every != 1):
            raise ValueError('memory and memory_every are used with recovery="restart" only; leave them out')
        if isinstance(self.memory_every, bool) or not isinstance(self.memory_every, int) or self.memory_every < 1:
            raise ValueError(f"memory_every={self.memory_every!r} must be a whole number of at least 1")
        if isinstance(self.min_members, bool) or not isinstance(self.min_members, int) or self.min_members < 1:
            raise ValueError(f"min_members={self.min_members!r} must be a whole number of at least 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed={self.seed!r} must be a whole number")
        if self.max_members is not None and (
            isinstance(self.max_members, bool) or not isinstance(self.max_members, int)
        ):
            raise ValueError(f"max_members={self.max_members!r} must be a whole number, or None for no limit")
        if self.max_members is not None and self.max_members < self.min_members:
            raise ValueError(f"max_members={self.max_members} is less than min_members={self.min_members}")
        if self.last_call_seconds is None:
            object.__setattr__(self, "last_call_seconds", LAST_CALL_SECONDS[self.recovery])
        if not 0 <= self.start_seconds < math.inf:
            raise ValueError(f"start_seconds={self.start_seconds!r} must be a number of seconds, at least 0")
        for name in ("dead_seconds", "last_call_seconds", "timeout_seconds", "join_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a positive number of seconds")
