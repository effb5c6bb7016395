"""Why a world ended, and who left it on purpose: keys in the store that all members see."""

from __future__ import annotations

import json
import time

from .job_store import JobStore
from .rendezvous import exits_key
from .world import Failure, Member

__all__ = ["WorldEnds"]


class WorldEnds:
    """The ends of worlds of a job."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

    def report(self, round_: int, node: str, reason: str) -> Failure:
        """Report that a world is broken; the first report of that world, which may be another member's."""
        value = json.dumps([node, reason, time.time()])
        return Failure(*json.loads(self._store.compare_set(f"fail/{round_}", "", value)))

    def failure(self, round_: int) -> Failure | None:
        """The first report of a world, or None."""
        key = f"fail/{round_}"
        return Failure(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def leave(self, round_: int, member: Member, for_good: bool) -> None:
        """Say that a member leaves a world on purpose, before it does so."""
        self._store.set(f"left/{round_}/{member.number}", "for good" if for_good else "joins again")
        if not for_good:
            self._store.add(exits_key(round_), 1)

    def has_left(self, round_: int, member: Member) -> bool:
        """Whether a member has left a world on purpose."""
        return self._store.check([f"left/{round_}/{member.number}"])

    def has_departed(self, round_: int, member: Member) -> bool:
        """Whether a member has left a world for good."""
        return self.has_left(round_, member) and self._store.get(f"left/{round_}/{member.number}") == b"for good"
