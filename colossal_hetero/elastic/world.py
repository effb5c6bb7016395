"""Worlds, their members and ends, and the limits of all waits."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

NEW = 2  # the age of a member that was in no world. Rounds count from 0, so all other ages are below 1.


class Member(NamedTuple):
    """A process of the job. The order of members is that of their ranks in the next world."""

    age: int
    """The negative number of the latest round that it was in, so that survivors come first; NEW if it was in none."""
    place: int  # its rank in that round; the number of a new member
    number: int  # number of the process, unique in the job; it counts up
    node: str
    pid: int

    def survives(self, round_: int) -> bool:
        """True if this member comes from the world right before ``round_``."""
        return self.age == 1 - round_


class World(NamedTuple):
    rank: int
    size: int
    round: int  # number of the world in the job; it grows, but not always by one
    nodes: tuple[str, ...]


class Failure(NamedTuple):
    """Unplanned end of a world, as the first member that noticed it reported it."""

    node: str
    reason: str


class MembershipError(Exception):
    """A process cannot be a member of a world."""


class StoreLostError(MembershipError):
    """The store does not answer, or was never there."""


class JoinTimeoutError(MembershipError):
    """No world formed within the limit."""


class JobEndedError(MembershipError):
    """The job has ended, so nobody can join it."""


@dataclass(frozen=True, kw_only=True)
class MembershipTiming:
    """Limits of all waits of a member. They must be the same on all members of a job."""

    keep_alive_seconds: float = 0.5
    """Interval of a member's signs of life in the store. Clocks of machines must agree better than the product with
    ``keep_alive_attempts``: members compare the times that others wrote with their own clock."""
    keep_alive_attempts: int = 4
    """Missed signs after which a member counts as dead. Below 1 s in all, slow members on a busy machine did."""
    last_call_seconds: float = 1.0
    """Time for others to join once there are enough members; cut short if all who were expected are there."""
    join_limit_seconds: float = 600.0
    """Longest wait for enough members. A spare, for which there is no place, waits as long as the job lasts."""
    collective_limit_seconds: float = 60.0
    """Longest collective. A member that does not take part, or an error that Gloo loses, is noticed after this time."""
    store_limit_seconds: float = 5.0  # longest wait for an answer of the store
    poll_seconds: float = 0.05
    """Pause between looks whether the world is broken, and, while a member joins, who else is there."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name} is {value}, but must be above 0; the default is {field.default}")

    @property
    def dead_wait_seconds(self) -> float:
        """Silence after which a member is taken for dead."""
        return self.keep_alive_seconds * self.keep_alive_attempts
