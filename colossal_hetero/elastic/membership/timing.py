"""How long the members of a job wait for each other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = ["MembershipTiming"]


@dataclass(frozen=True, kw_only=True)
class MembershipTiming:
    """Limits of all waits of a member. They must be the same on all members of a job.

    Raises:
        ValueError: a value is not positive.
    """

    keep_alive_seconds: float = 0.5
    """A member writes this often into the store that it lives. The clocks of the machines must agree better than the
    product with ``keep_alive_attempts``: members compare the times that others wrote with their own clock."""
    keep_alive_attempts: int = 4
    """A member that has missed so many of these messages is taken for dead. Below one second in all, members that are
    only slow were taken for dead on a busy machine."""
    last_call_seconds: float = 1.0
    """Once there are enough members, others may still join for so long. It is cut short if all who were expected are
    there, so it is spent when a job starts, and rarely later."""
    join_limit_seconds: float = 600.0
    """Longest wait for enough members. A spare, for which there is no place, waits as long as the job lasts."""
    collective_limit_seconds: float = 60.0
    """Longest collective: a member that lives but does not take part is noticed after this time. Also the longest wait
    in the rare case in which Gloo loses the error of a broken connection."""
    store_limit_seconds: float = 5.0
    """Longest wait for an answer of the store."""
    poll_seconds: float = 0.05
    """A member looks this often whether its world is broken, and, while it joins, who else is there."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name} is {value}, but must be above 0; the default is {field.default}")

    @property
    def dead_wait_seconds(self) -> float:
        """A member that has been silent for so long is taken for dead."""
        return self.keep_alive_seconds * self.keep_alive_attempts
