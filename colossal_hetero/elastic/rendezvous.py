"""Rendezvous of members: torch's dynamic rendezvous, whose state is one value in the store: the members of the present
round (*participants*), those who wait for the next one (*wait list*), spares (*redundancy list*), and when each was
last heard of. Everybody who reads it removes those that have been silent for too long. The next round opens when all
participants of the present one have left it, or are removed. ``DynamicRendezvousHandler`` is not used: its dead-wait is
15 s, it looks once a second, and at the end others wait up to a minute for rank 0 if it dies meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _Action,
    _BackendRendezvousStateHolder,
    _DistributedRendezvousOpExecutor,
    _NodeDesc,
    _RendezvousCloseOp,
    _RendezvousContext,
    _RendezvousExitOp,
    _RendezvousJoinOp,
    _RendezvousKeepAliveOp,
)

from .job_store import JobStore
from .world import JobEndedError, JoinTimeoutError, Member, MembershipTiming

# torch decides most of how members join. Added: survivors go first, because layers that only a survivor has would be
# lost if spares took the places; a world is complete, without the last call, as soon as all survivors and those who
# wait are there; a member that waits for a place in a full world becomes a spare.


SECONDS_PER_NOTICE = 5.0  # time after which an incomplete world says who is missing
_MAX_ROUND = 10**9


def described(member: Member) -> _NodeDesc:
    """``member`` for torch's rendezvous, which gives ranks in the order of these, which is that of members."""
    return _NodeDesc(f"{_MAX_ROUND + member.age:010d}|{member.place:09d}|{member.node}", member.pid, member.number)


def member_of(description: _NodeDesc) -> Member:
    age, place, node = description.addr.split("|", 2)
    return Member(int(age) - _MAX_ROUND, int(place), description.local_id, node, description.pid)


def next_action(
    action: _Action, state: Any, node: _NodeDesc, settings: RendezvousSettings, expected: int, may_wait: bool
) -> _Action:
    """Next action of a member that joins, where torch's own is ``action``."""
    count = len(state.participants)
    if state.complete:
        is_late = node in state.wait_list and count >= settings.max_nodes
        return _Action.REMOVE_FROM_WAIT_LIST if is_late else action
    survivors = sum(member_of(each).survives(state.round) for each in state.participants)
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
    """Message to the user if too few members are there."""
    numbers = {member.number for member in there}
    missing = [member.node for member in before if member.number not in numbers]
    names = f"; missing since the last world: {', '.join(missing)}" if missing else ""
    return (
        f"job {job} needs at least {min_members} members, and {len(there)} came "
        f"({', '.join(member.node for member in sorted(there))}){names}"
    )


_CHANGES: dict[_Action, Callable[[_DistributedRendezvousOpExecutor], None]] = {
    _Action.KEEP_ALIVE: _DistributedRendezvousOpExecutor._keep_alive,
    _Action.ADD_TO_PARTICIPANTS: _DistributedRendezvousOpExecutor._add_to_participants,
    _Action.ADD_TO_WAIT_LIST: _DistributedRendezvousOpExecutor._add_to_wait_list,
    _Action.ADD_TO_REDUNDANCY_LIST: _DistributedRendezvousOpExecutor._add_to_redundancy_list,
    _Action.REMOVE_FROM_PARTICIPANTS: _DistributedRendezvousOpExecutor._remove_from_participants,
    _Action.REMOVE_FROM_WAIT_LIST: _DistributedRendezvousOpExecutor._remove_from_wait_list,
    _Action.REMOVE_FROM_REDUNDANCY_LIST: _DistributedRendezvousOpExecutor._remove_from_redundancy_list,
    _Action.MARK_RENDEZVOUS_COMPLETE: _DistributedRendezvousOpExecutor._mark_rendezvous_complete,
    _Action.MARK_RENDEZVOUS_CLOSED: _DistributedRendezvousOpExecutor._mark_rendezvous_closed,
}


class Roster(NamedTuple):
    round: int
    members: tuple[Member, ...]
    waiting: int


class _Executor(_DistributedRendezvousOpExecutor):
    """Executor that looks again after ``poll_seconds``, where its parent waits for a second."""

    def __init__(self, node: _NodeDesc, holder: Any, settings: RendezvousSettings, poll_seconds: float) -> None:
        super().__init__(node, holder, settings)
        self._poll_seconds = poll_seconds

    def _record(self, *arguments: Any, **named: Any) -> None:
        """Record nothing: for the name of an event, the parent inspects all modules, which takes up to 0.4 s."""

    def run(
        self,
        state_handler: Callable[[_RendezvousContext, float], _Action],
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        while True:
            self._state_holder.sync()
            self._state = self._state_holder.state
            action = state_handler(_RendezvousContext(self._node, self._state, self._settings), deadline)
            if action is _Action.FINISH:
                return
            if action is _Action.ERROR_CLOSED:
                raise RendezvousClosedError
            if action is _Action.ERROR_TIMEOUT:
                raise RendezvousTimeoutError
            if action is _Action.SYNC:
                time.sleep(self._poll_seconds)
                continue
            _CHANGES[action](self)
            if action is _Action.REMOVE_FROM_REDUNDANCY_LIST and update_deadline is not None:
                deadline = update_deadline(self._settings.timeout.join)
            self._state_holder.mark_dirty()


class Rendezvous:
    """The rendezvous as one member sees it. Only one thread may use it at a time."""

    def __init__(self, store: JobStore, job: str, min_members: int, max_members: int, timing: MembershipTiming) -> None:
        self._store, self._job, self._timing = store, job, timing
        self._settings = RendezvousSettings(
            job,
            min_members,
            max_members,
            RendezvousTimeout(
                join=timedelta(seconds=timing.join_limit_seconds),
                last_call=timedelta(seconds=timing.last_call_seconds),
            ),
            timedelta(seconds=timing.keep_alive_seconds),
            timing.keep_alive_attempts,
        )
        backend = C10dRendezvousBackend(store, "rendezvous")  # type: ignore[arg-type]
        self._holder = _BackendRendezvousStateHolder(backend, self._settings, cache_duration=0)
        self._node: _NodeDesc | None = None

    def join(self, member: Member, before: Sequence[Member]) -> Roster:
        self._node = described(member)
        operation = _Joining(self._store, self._job, self._timing, before)
        try:
            self._run(operation, self._timing.join_limit_seconds, self._deadline)
        except RendezvousTimeoutError:
            limit = self._timing.join_limit_seconds
            raise JoinTimeoutError(f"no world formed within {limit:g} s: {operation.message(self._settings)}") from None
        except JobEndedError:
            raise JobEndedError(f"job {self._job} has ended; start another one under a new name") from None
        return self._roster()

    def beat(self) -> Roster:
        """Say that this member lives, if that is due; returns who is there."""
        self._run(_RendezvousKeepAliveOp(), self._timing.join_limit_seconds)
        return self._roster()

    def is_there(self, node: str) -> bool:
        """True if a living member of this node takes part or waits. This member need not have joined."""
        self._holder.sync()
        state = self._holder.state
        everyone = (*state.participants, *state.wait_list, *state.redundancy_list)
        return any(member_of(each).node == node for each in everyone)

    def exit(self) -> None:
        if self._node is not None:
            self._run(_RendezvousExitOp(), self._timing.join_limit_seconds)
            self._node = None

    def close(self) -> None:
        """End the job: those who wait, and those who come, get ``JobEndedError``."""
        self._run(_RendezvousCloseOp(), self._timing.join_limit_seconds)

    def _run(self, operation: Any, limit_seconds: float, update: Callable[[timedelta], float] | None = None) -> None:
        assert self._node is not None, "join first"
        executor = _Executor(self._node, self._holder, self._settings, self._timing.poll_seconds)
        executor.run(operation, time.monotonic() + limit_seconds, update)

    def _deadline(self, limit: timedelta) -> float:
        return time.monotonic() + limit.total_seconds()

    def _roster(self) -> Roster:
        state = self._holder.state
        ranked = sorted(state.participants, key=lambda node: state.participants[node])
        return Roster(state.round, tuple(member_of(node) for node in ranked), len(state.wait_list))


class _Joining:
    def __init__(self, store: JobStore, job: str, timing: MembershipTiming, before: Sequence[Member]) -> None:
        self._store, self._job, self._timing, self._before = store, job, timing, before
        self._join = _RendezvousJoinOp()
        self._expected: dict[int, int] = {}
        self._opened: dict[int, float] = {}
        self._there: list[Member] = []
        self._start: float | None = time.monotonic()

    def __call__(self, context: _RendezvousContext, deadline: float) -> _Action:
        state, node, settings = context.state, context.node, context.settings
        if state.closed:
            raise JobEndedError
        action = self._join(context, deadline)
        if state.complete or action is _Action.ERROR_TIMEOUT:
            return next_action(action, state, node, settings, 0, may_wait=False)
        now = time.monotonic()
        if state.round not in self._expected:
            self._opened[state.round] = now
            self._expected[state.round] = self._store.add(exits_key(state.round - 1), 0)
        may_wait = now - self._opened[state.round] < self._timing.last_call_seconds / 2
        if node in state.participants and action is not _Action.REMOVE_FROM_PARTICIPANTS:
            self._there = [member_of(each) for each in state.participants]
            if self._start is not None and now - self._start > SECONDS_PER_NOTICE and node == min(state.participants):
                self._start = None
                if len(state.participants) < settings.min_nodes:
                    limit = self._timing.join_limit_seconds
                    words = f"colossal_hetero: waiting up to {limit:g} s: {self.message(settings)}"
                    print(words, file=sys.stderr, flush=True)
        return next_action(action, state, node, settings, self._expected[state.round], may_wait)

    def message(self, settings: RendezvousSettings) -> str:
        return missing_message(self._job, self._there, self._before, settings.min_nodes)


def exits_key(round_: int) -> str:
    """Key of the number of members that have left a round in order to join the next one."""
    return f"joining again/{round_}"
