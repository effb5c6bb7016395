"""The thread of a member that says that it lives, and ends a broken world."""

from __future__ import annotations

import threading
import time

from .connections import WorldConnections
from .errors import StoreLostError
from .rendezvous import Rendezvous, Roster
from .timing import MembershipTiming
from .world import Failure, Member
from .world_ends import WorldEnds

__all__ = ["Monitor"]

BEATS = 4
"""The thread looks so many times per keep-alive interval whether the next message is due, and who is dead."""


class Monitor:
    """Watches the world of a round, from the end of its rendezvous on.

    Args:
        rendezvous: which only this thread uses until :meth:`stop` has returned.
        ends: reports of broken worlds.
        roster: the members of the round.
        me: this member, as it is in the roster.
        connections: those of the round.
        timing: limits of waits.
    """

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
        """Who was there when the thread last looked; also those who wait."""
        self.failure: Failure | None = None
        """Why the world is broken, once this member has noticed it."""
        self.notice_seconds = 0.0
        """From the report of the failure until this member noticed it."""
        self.lost: StoreLostError | None = None
        """The store's last error; the thread has ended then."""
        self._watching = True
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="colossal_hetero membership", daemon=True)
        self._thread.start()

    def fail(self, reason: str) -> None:
        """Report that the world is broken, and cut its connections."""
        try:
            self._notice(self._ends.report(self._round, self._me.node, reason))
        finally:
            self._connections.cut()

    def stop_watching(self) -> None:
        """This member leaves the world, so its end concerns this member no more. It still says that it lives."""
        self._watching = False

    def stop(self) -> None:
        """End the thread."""
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
            self.notice_seconds = max(0.0, time.time() - failure.seconds)
            self.failure = failure
