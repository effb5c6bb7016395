"""What the members of an elastic job write while they train, one JSON line per step, for whoever follows the job."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from colossal_hetero.planner.report.plan_table import layout


@dataclass(frozen=True)
class Loss:
    """Of the passes of a step, written before the step is made: whoever has taken part in a step has written it."""

    node: str
    step: int
    """The number of the step, from 1."""
    since: int
    """The step after which the members became those that they are."""
    loss: float
    """The mean over the samples of this member's replica."""
    share: float
    """The share of these samples in the global batch."""


@dataclass(frozen=True)
class Step:
    """An optimizer step, as one member has made it."""

    node: str
    step: int
    """Its number, from 1."""
    since: int
    """The step after which the members became those that they are."""
    time: float
    """In seconds; the clock of the system."""


@dataclass(frozen=True)
class World:
    """The members have changed, or are the first ones."""

    node: str
    since: int
    members: int
    plan: str
    seconds: float = 0.0
    """How long this member was busy with the change."""
    received_bytes: int = 0
    """By this member."""
    iterations_repeated: int = 0
    reason: str = ""
    started: bool = False
    """Whether the process of this member has just begun to train."""


@dataclass(frozen=True)
class Finished:
    """A member has finished its part of the job."""

    node: str


KINDS = {"loss": Loss, "step": Step, "world": World, "finished": Finished}
NAMES = {kind: name for name, kind in KINDS.items()}


class LoopTrace:
    """Follows a training loop, and writes what it does into a file in ``folder``; nothing if that is None.

    Args:
        node: name of this member's node.
        plugin: that trains.
        start: what its ``resume`` has returned.
    """

    def __init__(self, folder: Path | None, node: str, plugin: Any, start: Any) -> None:
        self._node, self._plugin, self._since = node, plugin, start.step
        self._file = None if folder is None else (folder / f"{node}-{os.getpid()}.jsonl").open("a", buffering=1)
        self._changes = len(plugin.recoveries)
        self._write_world(received_bytes=start.received_bytes, started=True)

    def passes_done(self, step: int, loss: Any) -> None:
        """``execute_pipeline`` of a step has returned; ``loss`` is known on the last stage of a replica."""
        self._write_changes()
        plan, (replica, _) = self._plugin.plan, self._plugin.replica()
        share = plan.replicas[replica].micro_batches * plan.micro_batch / plan.global_batch
        self._passes_since = self._since
        if loss is not None:
            self._write(Loss(self._node, step, self._since, float(loss), share))

    def step_done(self, step: int) -> None:
        """``optimizer.step`` has returned."""
        self._write(Step(self._node, step, self._passes_since, time.time()))
        self._write_changes()

    def finished(self) -> None:
        """The loop has ended."""
        self._write(Finished(self._node))

    def _write_changes(self) -> None:
        for change in self._plugin.recoveries[self._changes :]:
            self._since = change.version
            self._write_world(
                seconds=change.seconds,
                received_bytes=change.received_bytes,
                iterations_repeated=change.iterations_repeated,
                reason=change.reason,
            )
        self._changes = len(self._plugin.recoveries)

    def _write_world(self, **change: Any) -> None:
        plan = self._plugin.plan
        self._write(World(self._node, self._since, dist.get_world_size(), layout(plan), **change))

    def _write(self, entry: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": NAMES[type(entry)], **asdict(entry)}) + "\n")


class TraceReader:
    """Reads what all members have written into ``folder`` since the last call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> list[Any]:
        """The new entries; those of one member in their order."""
        entries = []
        for path in sorted(self._folder.glob("*.jsonl")):
            start = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                whole, _, _ = file.read().rpartition(b"\n")  # a line that is being written is read next time
            if not whole:
                continue
            self._read[path] = start + len(whole) + 1
            for line in whole.splitlines():
                content = json.loads(line)
                entries.append(KINDS[content.pop("kind")](**content))
        return entries
