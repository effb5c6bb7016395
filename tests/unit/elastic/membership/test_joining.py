"""Who joins the next world, in which order, and when it is complete."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _Action,
    _RendezvousState,
)

from colossal_hetero.elastic.rendezvous import described, member_of, missing_message, next_action
from colossal_hetero.elastic.world import NEW, Member, MembershipTiming

SETTINGS = RendezvousSettings("job", 2, 3, RendezvousTimeout(), timedelta(seconds=1), 2)

FIRST, SECOND = Member(-4, 0, 9, "b", 1), Member(-4, 1, 2, "a|x", 1)
OLD, NEW_1, NEW_2 = Member(-3, 0, 1, "c", 1), Member(NEW, 10, 10, "d", 1), Member(NEW, 11, 11, "a", 1)


def state_of(participants: list[Member], waiting: list[Member], spares: list[Member] | None = None) -> _RendezvousState:
    state = _RendezvousState()
    state.round = 5
    state.participants = {described(member): 0 for member in participants}
    state.wait_list = {described(member) for member in waiting}
    state.redundancy_list = {described(member) for member in spares or []}
    return state


def test_survivors_come_first_and_new_members_last() -> None:
    order = [FIRST, SECOND, OLD, NEW_1, NEW_2]
    descriptions = sorted(described(member) for member in reversed(order))
    assert [member_of(each) for each in descriptions] == sorted(order) == order
    assert [member.survives(5) for member in order] == [True, True, False, False, False]
    assert not NEW_1.survives(0), "nobody was there before the first round"


@pytest.mark.parametrize(
    ("participants", "waiting", "expected", "complete"),
    [
        ([FIRST, SECOND], [], 2, True),
        ([FIRST, SECOND], [], 3, False),  # one is still on its way
        ([FIRST, SECOND], [NEW_1], 2, False),
        ([FIRST], [], 1, False),  # the world needs two
        ([FIRST, NEW_1], [], 1, True),
        ([NEW_1, NEW_2], [], 0, False),  # nobody knows who else comes
    ],
)
def test_a_world_is_complete_when_all_expected_are_there(
    participants: list[Member], waiting: list[Member], expected: int, complete: bool
) -> None:
    state = state_of(participants, waiting)
    action = next_action(_Action.SYNC, state, described(participants[0]), SETTINGS, expected, may_wait=True)
    assert action is (_Action.MARK_RENDEZVOUS_COMPLETE if complete else _Action.SYNC)


def test_a_spare_is_waited_for_if_there_is_a_place() -> None:
    node = described(FIRST)
    for members, action in (([FIRST, SECOND], _Action.SYNC), ([FIRST, SECOND, OLD], _Action.MARK_RENDEZVOUS_COMPLETE)):
        assert next_action(_Action.SYNC, state_of(members, [], [NEW_1]), node, SETTINGS, 2, may_wait=True) is action


def test_new_members_let_survivors_go_first() -> None:
    state, add = state_of([FIRST], [NEW_1]), _Action.ADD_TO_PARTICIPANTS
    assert next_action(add, state, described(NEW_1), SETTINGS, 2, may_wait=True) is _Action.SYNC
    assert next_action(add, state, described(OLD), SETTINGS, 2, may_wait=True) is _Action.SYNC
    assert next_action(add, state, described(SECOND), SETTINGS, 2, may_wait=True) is add
    assert next_action(add, state, described(NEW_1), SETTINGS, 2, may_wait=False) is add
    assert next_action(add, state, described(NEW_1), SETTINGS, 1, may_wait=True) is add


def test_who_waits_for_a_full_world_becomes_a_spare() -> None:
    state = state_of([FIRST, SECOND, OLD], [NEW_1])
    state.complete = True
    action = next_action(_Action.SYNC, state, described(NEW_1), SETTINGS, 0, may_wait=False)
    assert action is _Action.REMOVE_FROM_WAIT_LIST


def test_the_message_names_who_is_missing() -> None:
    assert missing_message("j", [FIRST], [FIRST, OLD], 3) == (
        "job j needs at least 3 members, and 1 came (b); missing since the last world: c"
    )


def test_limits_are_positive() -> None:
    assert MembershipTiming().dead_wait_seconds == 2.0
    with pytest.raises(ValueError, match="poll_seconds is 0, but must be above 0; the default is"):
        MembershipTiming(poll_seconds=0)
