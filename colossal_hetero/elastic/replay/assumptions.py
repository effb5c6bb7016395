"""What a replay assumes: how long recoveries and restarts take, and how often checkpoints are saved."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

__all__ = ["Assumptions"]


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Times in seconds, and how often the job is saved.

    Raises:
        ValueError: A time is negative or infinite, or ``save_every`` is below 1.
    """

    dead_wait_seconds: float = 2.0
    """Recovery: until the others take a device that is gone for dead."""
    last_call_seconds: float = 1.0
    """Recovery and join: how long a meeting waits for more participants."""
    resume_seconds: float = 1.5
    """Recovery and join: planning, new groups and a new start; what moves between devices comes in addition."""
    process_seconds: float = 20.0
    """Restart: until all processes have ended, and new ones have started and met."""
    import_seconds: float = 18.0
    """Restart: until new processes have imported torch and Colossal-AI."""
    load_seconds: float = 0.0
    """Reading the state of the whole job from the shared folder."""
    save_seconds: float = 0.0
    """Writing it there, in the background. A checkpoint is whole, and can be used, after this time."""
    save_every: int = 50
    """Iterations from one checkpoint to the next."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "save_every" and not 0 <= value < math.inf:
                raise ValueError(f"{field.name}={value}: must be a finite number of seconds, at least 0")
        if self.save_every < 1:
            raise ValueError(f"save_every={self.save_every}: must be at least 1 iteration")

    @property
    def start_seconds(self) -> float:
        """Time until a new process can take part."""
        return self.process_seconds + self.import_seconds

    @property
    def join_seconds(self) -> float:
        """How long training pauses for a join, without what moves between devices."""
        return self.last_call_seconds + self.resume_seconds

    @property
    def recovery_seconds(self) -> float:
        """From a loss to the next iteration, without what moves between devices."""
        return self.dead_wait_seconds + self.join_seconds

    @property
    def restart_seconds(self) -> float:
        """From the end of all processes to the next iteration."""
        return self.start_seconds + self.load_seconds
