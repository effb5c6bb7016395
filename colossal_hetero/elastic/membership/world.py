"""What members know about their world, about its end, and about how the next one formed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["NEW", "Failure", "Formation", "Member", "World"]

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
        """Whether this member comes from the world right before ``round_``."""
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
