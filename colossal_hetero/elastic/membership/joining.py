"""Who joins the next world, and when it is complete: decisions on the state of torch's rendezvous.

torch decides most of it. Three things are added:

- Survivors go first. If spares took the places before survivors came, layers that only a survivor has would be lost.
- A world is complete as soon as everybody who is expected is there, without the last call: the survivors, which have
  all left the world before, and those who wait.
- A member that waits for a place in a full world becomes a spare.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings, _Action, _NodeDesc

from .world import Member

__all__ = ["SECONDS_PER_NOTICE", "described", "member_of", "missing_message", "next_action"]

SECONDS_PER_NOTICE = 5.0
"""A world that is not complete for so long says who is missing."""

_MAX_ROUND = 10**9


def described(member: Member) -> _NodeDesc:
    """How torch's rendezvous knows ``member``. torch gives ranks in the order of these, which is that of members."""
    return _NodeDesc(f"{_MAX_ROUND + member.age:010d}|{member.place:09d}|{member.node}", member.pid, member.number)


def member_of(description: _NodeDesc) -> Member:
    """The member that :func:`described` was given."""
    age, place, node = description.addr.split("|", 2)
    return Member(int(age) - _MAX_ROUND, int(place), description.local_id, node, description.pid)


def survivors_in(participants: Collection[_NodeDesc], round_: int) -> int:
    """How many of ``participants`` come from the world before ``round_``."""
    return sum(member_of(each).survives(round_) for each in participants)


def next_action(
    action: _Action, state: Any, node: _NodeDesc, settings: RendezvousSettings, expected: int, may_wait: bool
) -> _Action:
    """What a member does that joins.

    Args:
        action: what torch's ``_RendezvousJoinOp`` says.
        state: torch's ``_RendezvousState``.
        node: this member.
        settings: with the smallest and largest number of members.
        expected: number of members that left the world before in order to join the next one.
        may_wait: whether this member may wait for survivors that have not joined yet.
    """
    count = len(state.participants)
    if state.complete:
        is_late = node in state.wait_list and count >= settings.max_nodes
        return _Action.REMOVE_FROM_WAIT_LIST if is_late else action
    survivors = survivors_in(state.participants, state.round)
    if action is _Action.ADD_TO_PARTICIPANTS:
        is_survivor = member_of(node).survives(state.round)
        return _Action.SYNC if survivors < expected and may_wait and not is_survivor else action
    waiting = state.wait_list or (state.redundancy_list and count < settings.max_nodes)
    if (
        action in (_Action.SYNC, _Action.KEEP_ALIVE)
        and node in state.participants
        and count >= settings.min_nodes
        and 0 < expected <= survivors
        and not waiting
    ):
        return _Action.MARK_RENDEZVOUS_COMPLETE
    return action


def missing_message(job: str, there: Collection[Member], before: Sequence[Member], min_members: int) -> str:
    """What a user reads when too few members are there.

    Args:
        job: name of the job.
        there: those who are there.
        before: the members of the world before, as this member knows it; empty if there was none.
        min_members: the number that is needed.
    """
    numbers = {member.number for member in there}
    missing = [member.node for member in before if member.number not in numbers]
    names = f"; missing since the last world: {', '.join(missing)}" if missing else ""
    return (
        f"job {job} needs at least {min_members} members, and {len(there)} came "
        f"({', '.join(member.node for member in sorted(there))}){names}"
    )
