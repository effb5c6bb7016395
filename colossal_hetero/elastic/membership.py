"""Membership of a process in a job, in one world after the other."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

from .job_store import JobStore, WorldConnections
from .process_groups import LaunchedState, ProcessGroups
from .rendezvous import Rendezvous, Roster, exits_key
from .world import (
    NEW,
    Failure,
    JoinTimeoutError,
    Member,
    MembershipError,
    MembershipTiming,
    StoreLostError,
    World,
)


class WorldEnds:
    def __init__(self, store: JobStore) -> None:
        self._store = store

    def report(self, round_: int, node: str, reason: str) -> Failure:
        """Report that a world is broken; the first report of that world, which may be another member's."""
        value = json.dumps([node, reason])
        return Failure(*json.loads(self._store.compare_set(f"fail/{round_}", "", value)))

    def failure(self, round_: int) -> Failure | None:
        key = f"fail/{round_}"
        return Failure(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def leave(self, round_: int, member: Member, joins_again: bool) -> None:
        """Say that a member leaves a world on purpose, before it does so."""
        self._store.set(f"left/{round_}/{member.number}", "")
        if joins_again:
            self._store.add(exits_key(round_), 1)

    def has_left(self, round_: int, member: Member) -> bool:
        return self._store.check([f"left/{round_}/{member.number}"])


BEATS = 4  # looks per keep-alive interval: is the next message due, and who is dead?


class Monitor:
    """Watches the world of a round, from the end of its rendezvous on."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        ends: WorldEnds,
        roster: Roster,
        me: Member,
        connections: WorldConnections,
        timing: MembershipTiming,
    ) -> None:
        self._rendezvous, self._ends, self._me, self._timing = rendezvous, ends, me, timing
        self._connections = connections
        self._round, self._members = roster.round, roster.members
        self.roster = roster
        self.failure: Failure | None = None  # end of the world, once this member has noticed it
        self.lost: StoreLostError | None = None  # last error of the store, which has ended the thread
        self._watching = True
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="colossal_hetero membership", daemon=True)
        self._thread.start()

    def fail(self, reason: str) -> None:
        try:
            self._notice(self._ends.report(self._round, self._me.node, reason))
        finally:
            self._connections.cut()

    def stop_watching(self) -> None:
        """Ignore the end of this world, which this member leaves. It still says that it lives."""
        self._watching = False

    def stop(self) -> None:
        self._watching = False
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        next_beat = 0.0
        while not self._stopped.wait(self._timing.poll_seconds):
            try:
                if time.monotonic() >= next_beat:
                    self.roster = self._rendezvous.beat()
                    next_beat = time.monotonic() + self._timing.keep_alive_seconds / BEATS
                    self._look_for_dead()
                if self._watching and self.failure is None:
                    self._notice(self._ends.failure(self._round))
            except StoreLostError as error:
                self.lost = error
                self._connections.cut()
                return
            if self._watching and self.failure is not None:
                self._connections.cut()  # also those that were opened since the last time

    def _look_for_dead(self) -> None:
        """Report members that have been removed because they were silent, this one included."""
        if not self._watching or self.failure is not None:
            return
        there = {member.number for member in self.roster.members}
        gone = [member for member in self._members if member.number not in there]
        dead = [member.node for member in gone if not self._ends.has_left(self._round, member)]
        if dead and self._watching:
            silent = f"no sign of life for {self._timing.dead_wait_seconds:g} s from {', '.join(dead)}"
            self._notice(self._ends.report(self._round, self._me.node, silent))

    def _notice(self, failure: Failure | None) -> None:
        if failure is not None and self.failure is None:
            self.failure = failure


MAX_ATTEMPTS = 20  # worlds in a row that may break before they are initialized
BREAK_SECONDS = 0.2
"""Time from cutting connections to destroying groups: Gloo's threads first hand the errors to those who wait."""


class Membership:
    """Membership of this process in a job. The store lives on a machine that stays (``colossal-hetero store``).

    For each world: :meth:`form`, make groups, :meth:`seal`, train until :meth:`is_somebody_waiting` on some rank or
    until a ``RuntimeError``, which :meth:`fail` reports, then :meth:`leave`. At the end: :meth:`depart`. All methods
    but ``fail`` must be called on the thread that trains.
    """

    def __init__(
        self,
        store_host: str,
        store_port: int,
        job: str,
        node: str,
        *,
        min_members: int = 1,
        max_members: int,
        timing: MembershipTiming | None = None,
        seed: int = 1024,
        node_order: Sequence[str] = (),
        launcher: str = "",
    ) -> None:
        if not 1 <= min_members <= max_members:
            raise ValueError(
                f"min_members is {min_members} and max_members {max_members}, but they must be 1 <= min_members <= "
                "max_members"
            )
        for name, value in (("job", job), ("node", node)):
            if not value:
                raise ValueError(f"the name of the {name} is empty; give it one")
        self._timing = timing or MembershipTiming()
        self._places = {name: place for place, name in enumerate(node_order)}
        self._job, self._max_members, self._launcher = job, max_members, launcher
        self._store = JobStore(store_host, store_port, job, self._timing.store_limit_seconds)
        self._ends = WorldEnds(self._store)
        self._rendezvous = Rendezvous(self._store, job, min_members, max_members, self._timing)
        number = self._store.add("members", 1)
        self._me = Member(age=NEW, place=number, number=number, node=node, pid=os.getpid())
        self._groups = ProcessGroups(self._timing.collective_limit_seconds)
        self._launched = LaunchedState(store_host, store_port, seed)
        self._monitor: Monitor | None = None
        self._connections: WorldConnections | None = None
        self._roster: Roster | None = None
        self._is_inside = False
        self._has_departed = False
        self.world: World | None = None

    @property
    def failure(self) -> Failure | None:
        """Failure of the present world, or of the latest one if this process has left it; None if it is not broken."""
        return self._monitor.failure if self._monitor is not None else None

    def form(self) -> World:
        """Join the next world, wait until it is complete, and initialize what ``colossalai.launch`` would initialize.

        Survivors of the world before come first and keep their order, new members come last. If a member dies before
        all are connected, another world forms, also within this call.
        """
        if self._has_departed:
            raise RuntimeError("this process has departed from the job; make another Membership to join it again")
        if self._connections is None and dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is initialized already; call Membership.form in place of colossalai.launch and "
                "torch.distributed.init_process_group"
            )
        self.leave()
        if self._roster is None:
            self._claim_node()
        before, cause = self._roster.members if self._roster else (), None
        for _ in range(MAX_ATTEMPTS):
            self._exit(joins_again=True)
            roster = self._rendezvous.join(self._me, before)
            try:
                self.world = self._initialize(roster)
                return self.world
            except RuntimeError as error:
                self.fail(f"a member has gone while the world formed: {error}")
                self.leave()
                cause = error
        words = f"job {self._job}: {MAX_ATTEMPTS} worlds in a row broke before they were initialized"
        raise JoinTimeoutError(words) from cause

    def seal(self) -> None:
        """Note that all groups of this world exist: connections opened from now on are not cut when it breaks."""
        self._present_connections().seal()

    def fail(self, reason: str) -> None:
        """Report, on any thread, that this world is broken. Collectives then raise; the first reason is kept."""
        if self._connections is not None and self._monitor is not None:
            if self._monitor.lost is not None:
                raise self._monitor.lost
            self._monitor.fail(reason)

    def leave(self) -> None:
        """Drop the world's groups and connections; until :meth:`form`, others do not wait for or miss this member."""
        if self._connections is None or self._monitor is None:
            return
        self._monitor.stop_watching()
        if self._monitor.failure is not None or self._monitor.lost is not None:
            self._connections.cut()
            time.sleep(BREAK_SECONDS)
        self._launched.leave()
        self._groups.destroy()
        self._connections.cut()  # of groups that somebody still refers to
        self._connections = self.world = None

    def depart(self) -> None:
        """Leave the world and the job for good. The others do not wait for this member. Call it when all leave."""
        self.leave()
        self._exit(joins_again=False)
        self._store.close()
        self._has_departed = True

    def end_job(self) -> None:
        """End the job: spares, and members that come later, get ``JobEndedError``. Some member calls it."""
        self._stop_monitor()
        self._rendezvous.close()

    def identity(self) -> str:
        """Name of the job that no job has in another store, or had before."""
        return f"{self._job}-{self._store.compare_set('identity', '', secrets.token_hex(8)).decode()}"

    def is_somebody_waiting(self) -> bool:
        """True if a member waits for a place in the next world. Answers may differ, so one member decides for all."""
        if self._monitor is None or self.world is None:
            return False
        roster = self._monitor.roster
        return roster.waiting > 0 and self.world.size < self._max_members

    def publish(self, name: str, text: str) -> None:
        self._store.set(f"published/{name}", text)

    def published(self, name: str) -> str | None:
        key = f"published/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def count(self, name: str, number: int) -> int:
        """Add to a number that all members share, which is 0 at first; the sum."""
        return self._store.add(f"counted/{name}", number)

    def _claim_node(self) -> None:
        """Check that no other launcher has members with this node's name, if the store has the name of another one."""
        key, node = f"node/{self._me.node}", self._me.node
        holder = self._store.compare_set(key, "", self._launcher).decode()
        if holder != self._launcher:
            time.sleep(self._timing.dead_wait_seconds)  # until members that have ended without a word count as dead
            if not self._rendezvous.is_there(node):
                self._store.compare_set(key, holder, self._launcher)
            holder = self._store.get(key).decode()  # another worker of this launcher may have replaced it
        if holder != self._launcher:
            raise MembershipError(
                f"node {node!r} is already in job {self._job!r}: {holder} has this name. Each node of a job needs a "
                "name of its own: give another one in COLOSSAL_HETERO_NODE, or another job in COLOSSAL_HETERO_JOB"
            )

    def _initialize(self, roster: Roster) -> World:
        members = sorted(roster.members, key=lambda each: self._places.get(each.node, len(self._places)))
        roster = roster._replace(members=tuple(members))
        numbers = [member.number for member in roster.members]
        rank = numbers.index(self._me.number)
        self._roster, self._me = roster, self._me._replace(age=-roster.round, place=rank)
        self._is_inside = True
        self._connections = WorldConnections(len(numbers))
        self._monitor = Monitor(self._rendezvous, self._ends, roster, self._me, self._connections, self._timing)
        world = World(rank, len(numbers), roster.round, tuple(member.node for member in roster.members))
        # A connection of its own: if the world breaks, waits for keys of the world end too.
        store = dist.PrefixStore(f"elastic/{self._job}/world/{roster.round}", self._store.connect())
        self._groups.initialize(store, world)
        self._launched.enter(world)
        return world

    def _exit(self, joins_again: bool) -> None:
        self._stop_monitor()
        if self._is_inside and self._roster is not None:
            self._ends.leave(self._roster.round, self._me, joins_again)
            self._is_inside = False
        self._rendezvous.exit()

    def _stop_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.stop()
            if self._monitor.lost is not None:
                raise StoreLostError(str(self._monitor.lost))

    def _present_connections(self) -> WorldConnections:
        if self._connections is None:
            raise RuntimeError("there is no world; call form() first")
        return self._connections
