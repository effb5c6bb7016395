"""What `elastic/rendezvous.py` relies on in torch's rendezvous: one test for each of its private names."""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState

from colossal_hetero.elastic import rendezvous
from colossal_hetero.elastic.rendezvous import (
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
from tests.support.paths import REPOSITORY

A, B, C = _NodeDesc("a", 1, 2), _NodeDesc("b", 1, 1), _NodeDesc("c", 0, 0)
LIMITS = RendezvousTimeout(join=timedelta(seconds=60), last_call=timedelta(seconds=30))
SETTINGS = RendezvousSettings("job", 1, 2, LIMITS, timedelta(seconds=1), 2)


def state_of(*participants: _NodeDesc, complete: bool = False, closed: bool = False) -> _RendezvousState:
    state = _RendezvousState()
    state.participants = {node: rank for rank, node in enumerate(participants)}
    state.last_heartbeats = {node: datetime.utcnow() for node in participants}
    state.complete, state.closed = complete, closed
    return state


def test_one_module_knows_the_names() -> None:
    modules = [
        path for path in (REPOSITORY / "colossal_hetero").rglob("*.py") if "dynamic_rendezvous" in path.read_text()
    ]
    assert [path.name for path in modules] == ["rendezvous.py"]


def test_node_descriptions_are_in_the_order_of_their_fields() -> None:
    assert sorted([C, B, A]) == [A, B, C] and (B.addr, B.pid, B.local_id) == ("b", 1, 1)
    assert {_NodeDesc("a", 1, 2): 0} == {A: 0} and pickle.loads(pickle.dumps(A)) == A


def test_settings_and_time_limits() -> None:
    assert (SETTINGS.min_nodes, SETTINGS.max_nodes, SETTINGS.keep_alive_max_attempt) == (1, 2, 2)
    assert (SETTINGS.timeout.join, SETTINGS.timeout.last_call) == (timedelta(seconds=60), timedelta(seconds=30))


def test_every_action_is_handled() -> None:
    ends = {_Action.SYNC, _Action.FINISH, _Action.ERROR_CLOSED, _Action.ERROR_TIMEOUT}
    assert set(_Action) == ends | set(rendezvous._CHANGES)


class Holder:
    """The state of one process alone."""

    def __init__(self, state: _RendezvousState) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("action", "before", "after"),
    [
        ("ADD_TO_PARTICIPANTS", state_of(A), "participants"),
        ("ADD_TO_WAIT_LIST", state_of(A), "wait_list"),
        ("ADD_TO_REDUNDANCY_LIST", state_of(A), "redundancy_list"),
    ],
)
def test_the_executor_changes_the_state(action: str, before: _RendezvousState, after: str) -> None:
    holder = Holder(before)
    executor = rendezvous._Executor(B, holder, SETTINGS, poll_seconds=0.0)
    assert isinstance(executor, _DistributedRendezvousOpExecutor)
    assert [executor._node, executor._state_holder, executor._settings] == [B, holder, SETTINGS]
    executor._state = holder.state
    rendezvous._CHANGES[_Action[action]](executor)
    assert B in getattr(holder.state, after) and B in holder.state.last_heartbeats
    remove = f"REMOVE_FROM_{after.upper()}" if after.endswith("list") else "REMOVE_FROM_PARTICIPANTS"
    rendezvous._CHANGES[_Action[remove]](executor)
    assert B not in getattr(holder.state, after) and A in holder.state.participants
    rendezvous._CHANGES[_Action.MARK_RENDEZVOUS_CLOSED](executor)
    assert holder.state.closed


def test_the_executor_gives_ranks_in_the_order_of_nodes() -> None:
    executor = rendezvous._Executor(A, Holder(state_of(C, B, A)), SETTINGS, poll_seconds=0.0)
    executor._state = executor._state_holder.state
    rendezvous._CHANGES[_Action.MARK_RENDEZVOUS_COMPLETE](executor)
    assert executor._state.complete and executor._state.participants == {A: 0, B: 1, C: 2}
    parameters = inspect.signature(_DistributedRendezvousOpExecutor.run).parameters
    assert list(parameters) == list(inspect.signature(rendezvous._Executor.run).parameters)


def test_the_holder_writes_what_is_marked_and_drops_silent_nodes() -> None:
    store = HashStore()
    first, second = (
        _BackendRendezvousStateHolder(C10dRendezvousBackend(store, "job"), SETTINGS, cache_duration=0) for _ in "ab"
    )
    first.sync()
    first.state.participants = {A: 0, B: 1}
    first.state.wait_list = {C}
    late = datetime.utcnow() - timedelta(seconds=3)
    first.state.last_heartbeats = {A: datetime.utcnow(), B: late, C: late}
    second.sync()
    assert not second.state.participants
    first.mark_dirty()
    first.sync()
    second.sync()
    assert (set(second.state.participants), second.state.wait_list) == ({A}, set())


def silent(state: _RendezvousState) -> _RendezvousState:
    state.last_heartbeats = dict.fromkeys(state.participants, datetime.utcnow() - timedelta(seconds=1.5))
    return state


@pytest.mark.parametrize(
    ("operation", "state", "action"),
    [
        (_RendezvousJoinOp, state_of(), "ADD_TO_PARTICIPANTS"),
        (_RendezvousJoinOp, state_of(B, complete=True), "ADD_TO_WAIT_LIST"),
        (_RendezvousJoinOp, state_of(B, C, complete=True), "ADD_TO_REDUNDANCY_LIST"),
        (_RendezvousJoinOp, state_of(A, complete=True), "FINISH"),
        (_RendezvousJoinOp, state_of(closed=True), "ERROR_CLOSED"),
        (_RendezvousExitOp, state_of(A), "REMOVE_FROM_PARTICIPANTS"),
        (_RendezvousExitOp, state_of(B), "FINISH"),
        (_RendezvousCloseOp, state_of(A), "MARK_RENDEZVOUS_CLOSED"),
        (_RendezvousCloseOp, state_of(A, closed=True), "FINISH"),
        (_RendezvousKeepAliveOp, silent(state_of(A)), "KEEP_ALIVE"),
    ],
)
def test_operations(operation: Callable[[], Callable[..., _Action]], state: _RendezvousState, action: str) -> None:
    context = _RendezvousContext(A, state, SETTINGS)
    assert (context.node, context.state, context.settings) == (A, state, SETTINGS)
    assert operation()(context, time.monotonic() + 60) is _Action[action]
