"""Kinds of devices that the profile does not have: a process measures its own before it joins.

The others train meanwhile. What was measured goes into the store, where the members find it before they make the plan
that has the newcomer, and where the next process with such a device finds it too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from typing import Protocol

from ....planner.cluster.topology import Topology
from ....planner.profile.layer_profile import ModelProfile
from ....planner.profile.more_kinds import with_kind

__all__ = ["Board", "KnownKinds", "own_kind"]

SECONDS_PER_LOOK = 0.2
"""Between two looks whether another process has measured."""


class Board(Protocol):
    """What all members of a job can read; see ``Membership``."""

    def published(self, name: str) -> str | None:
        """The text with this name; None if there is none."""

    def publish(self, name: str, text: str) -> None:
        """Show a text to all members."""

    def count(self, name: str, number: int) -> int:
        """Add to a number that all share, which is 0 at first; the sum."""


def own_kind(cluster: Topology, node: str, local_rank: int) -> str:
    """The kind of this process's device in the cluster.

    Raises:
        ValueError: the cluster does not have the node, or the node has fewer devices.
    """
    names = [each.name for each in cluster.nodes]
    if node not in names:
        raise ValueError(
            f"this process is on node {node}, which is not in the cluster file; it has {', '.join(names)}. Add the "
            "node to the cluster file of all nodes and start the job again, or start this process with one of these "
            "names (colossal-hetero launch --node)"
        )
    devices = cluster.nodes[names.index(node)].devices
    if local_rank >= len(devices):
        raise ValueError(
            f"this process is number {local_rank + 1} on node {node}, which has {len(devices)} "
            f"device{'s' if len(devices) > 1 else ''} in the cluster file; start at most one process for each device"
        )
    return cluster.devices[devices[local_rank]].kind.name


class KnownKinds:
    """The script's profile, and the kinds of devices that members have measured.

    Args:
        profile: of the script.
        board: of the job; None if there is none. Then kinds that the profile lacks cannot be measured.
        measure: measures the model's layers on the device of this process; None if the script does not say how.
        limit_seconds: so long a process waits for another one that measures the same kind.
    """

    def __init__(
        self,
        profile: ModelProfile,
        board: Board | None,
        measure: Callable[[], ModelProfile] | None,
        limit_seconds: float,
    ) -> None:
        self._profile, self._board, self._measure, self._limit = profile, board, measure, limit_seconds

    def with_kinds(self, kinds: Collection[str]) -> ModelProfile:
        """The profile with those of ``kinds`` that members have measured."""
        profile = self._profile
        for kind in sorted(set(kinds) - set(profile.devices)):
            text = None if self._board is None else self._board.published(_name(kind))
            if text is not None:
                profile = with_kind(profile, kind, ModelProfile.model_validate_json(text))
        return profile

    def learn(self, kind: str) -> None:
        """Measure the device of this process, if neither the profile nor another process knows its kind.

        Raises:
            ValueError: it cannot be measured; the message says why, and what to do.
        """
        if kind in self.with_kinds([kind]).devices:
            return
        if self._measure is None or self._board is None:
            way = " under torchrun, where processes cannot measure it" if self._board is None else ""
            remedy = "" if way else ", or give ElasticConfig(measure=...), which measures before the process joins"
            raise ValueError(
                f"the profile of {self._profile.name} has no times of {kind}, the device of this process{way}; it has "
                f"those of {', '.join(self._profile.devices)}. Measure this kind too and start the job again{remedy}"
            )
        deadline = time.monotonic() + self._limit
        while self._board.count(_name(kind) + "/measuring", 1) > 1 and time.monotonic() < deadline:
            self._board.count(_name(kind) + "/measuring", -1)
            time.sleep(SECONDS_PER_LOOK)
            if self._board.published(_name(kind)) is not None:
                return
        # After the limit, the other process is taken for dead.
        try:
            # It may have published, and counted itself out, since the last look.
            if self._board.published(_name(kind)) is None:
                self._measure_and_publish(kind, self._measure, self._board)
        finally:
            self._board.count(_name(kind) + "/measuring", -1)

    def _measure_and_publish(self, kind: str, measure: Callable[[], ModelProfile], board: Board) -> None:
        _say(f"{kind} is not in the profile of {self._profile.name}: measuring its layers before this process joins")
        begin = time.monotonic()
        try:
            measured = measure()
            merged = with_kind(self._profile, kind, measured)
        except Exception as error:
            raise ValueError(
                f"this process cannot join, because its device, {kind}, is not in the profile of {self._profile.name}, "
                f"and measuring it has failed: {type(error).__name__}: {error}"
            ) from error
        board.publish(_name(kind), measured.model_dump_json(by_alias=True))
        size = merged.micro_batches(kind, min(merged.tensor_parallel_degrees(kind)))[0]
        costs = merged.costs(kind, min(merged.tensor_parallel_degrees(kind)), size)
        seconds = float((costs.forward_seconds + costs.backward_seconds).sum())
        _say(
            f"{kind} was measured in {time.monotonic() - begin:.1f} s: a micro-batch of {size} takes "
            f"{1e3 * seconds:.3g} ms; all members have it"
        )


def _name(kind: str) -> str:
    return f"layers of {kind}"


def _say(text: str) -> None:
    print(f"colossal_hetero: {text}", file=sys.stderr, flush=True)
