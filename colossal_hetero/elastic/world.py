"""What members know about their world, about its end, and about how the next one formed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "NEW",
    "Failure",
    "Formation",
    "JobEndedError",
    "JoinTimeoutError",
    "Member",
    "MembershipError",
    "MembershipTiming",
    "StoreLostError",
    "World",
]


NEW = 2
"""The age of a member that was in no world. Rounds count from 0, so all other ages are below 1."""


class Member(NamedTuple):
    """A process of the job. The order of members is that of their ranks in the next world."""

    age: int
    """The negative number of the latest round that it was in, so that survivors come first; NEW if it was in none."""
    place: int
    """Its rank in that round; the number of a new member."""
    number: int
    """The number of the process, which no other process of the job has; it counts up."""
    node: str
    """Name of its node."""
    pid: int
    """Its process id on that node."""

    def survives(self, round_: int) -> bool:
        """True if this member comes from the world right before ``round_``."""
        return self.age == 1 - round_


class World(NamedTuple):
    """The members that communicate from one change to the next."""

    rank: int
    """Rank of this process."""
    size: int
    """Number of members."""
    round: int
    """Number of the world in the job; it grows, but not always by one."""
    nodes: tuple[str, ...]
    """Name of each member's node, by rank. A name may occur more than once."""


class Failure(NamedTuple):
    """The end of a world that was not planned, as the first member that noticed it reported it."""

    node: str
    """Node of the member that reported it."""
    reason: str
    seconds: float
    """When it was reported, by that member's clock, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class Formation:
    """How a world formed, and why the one before it ended; times are those of this member, in seconds."""

    world: World
    failure: Failure | None
    """Why the world before ended; None if that was planned, or if there was none."""
    gone: tuple[str, ...]
    """Nodes of the members that have gone without a word since this member's world before."""
    departed: tuple[str, ...]
    """Nodes of the members that have departed since then."""
    joined: tuple[str, ...]
    """Nodes of the members that have joined since then. All three are empty in a member's first world."""
    attempts: int
    """Number of rendezvous; more than 1 if a member died between a rendezvous and the end of the initialization."""
    notice_seconds: float
    """From the report of the failure to the moment in which this member cut its connections."""
    destruction_seconds: float
    """To drop the groups and connections of the world before."""
    rendezvous_seconds: float
    """To wait until dead members are known to be dead, and until the members of the new world are there."""
    initialization_seconds: float
    """To connect the members."""


# Errors --------------------------------------------------------------------------------------------------------------


class MembershipError(Exception):
    """This process cannot be a member of a world."""


class StoreLostError(MembershipError):
    """The store does not answer, or was never there."""


class JoinTimeoutError(MembershipError):
    """No world formed within the limit."""


class JobEndedError(MembershipError):
    """The job has ended, so nobody can join it."""


# Timing --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MembershipTiming:
    """Limits of all waits of a member. They must be the same on all members of a job."""

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
