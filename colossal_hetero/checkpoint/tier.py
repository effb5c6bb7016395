"""One save into one folder, as one rank takes part in it: the order of the steps that make it whole or not there.
Ranks send each other messages without collectives: an ended rank must not block the others."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import Field
from torch.distributed import HashStore, Store

from .config import CheckpointError
from .participants import Participants
from .pieces import MANIFEST, REPLACED, STATES, RunState, step_folder, unfinished_folder
from .records import SCHEMA, CheckpointPart, FileCheck, FileRecord, Manifest, NodePart, checksum
from .storage import (
    FileOperations,
    complete_folders,
    is_complete,
    read_manifest,
    remove_all,
    remove_leftovers,
    remove_old,
    write_file,
)

PAUSES_SECONDS = (0.002, 0.1)  # pauses between two looks for messages: the shortest, which doubles up to the longest.


class Stopped(Exception):
    """The saver was closed, or other ranks were lost, while this rank waited."""


class MessageStore:
    """Messages of all ranks, in a store of torch or in memory: by channel, number of the save or round, and name.

    A rank removes its own but for the last two numbers of a channel, since none begins before all ranks have finished
    the one before.
    """

    def __init__(self, store: Store | None, run: str, rank: int, ranks: int, is_broken: Callable[[], bool]) -> None:
        self._store: Store = HashStore() if store is None else store
        self._run, self._rank, self._ranks, self.is_broken = run, rank, ranks, is_broken
        self._closed = threading.Event()
        self._own: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._lock = threading.Lock()

    def put(self, channel: str, number: int, what: str, message: bytes) -> None:
        with self._lock:
            own = self._own[channel]
            own[number].add(what)
            while len(own) > 2:
                oldest = next(iter(own))
                for name in own.pop(oldest):
                    self._store.delete_key(self._name(channel, oldest, name))
            self._store.set(self._name(channel, number, what), message)  # type: ignore[arg-type]

    def get(self, channel: str, number: int, what: str) -> bytes | None:
        """The message, or None if it is not there yet."""
        name = self._name(channel, number, what)
        with self._lock:
            return self._store.get(name) if self._store.check([name]) else None  # type: ignore[attr-defined]

    def wait_for(self, channel: str, number: int, names: Iterable[str], deadline: float) -> dict[str, bytes]:
        """Messages that arrive before ``deadline``, a time of :func:`time.monotonic`, by name."""
        missing, found, pause = list(names), {}, PAUSES_SECONDS[0]
        while True:
            for name in list(missing):
                message = self.get(channel, number, name)
                if message is not None:
                    found[name] = message
                    missing.remove(name)
            if not missing or time.monotonic() > deadline:
                return found
            if self.is_broken() or self._closed.wait(pause):
                raise Stopped
            pause = min(2 * pause, PAUSES_SECONDS[1])

    def say_heard(self, channel: str, number: int) -> None:
        """Tell rank 0 that this rank has what it waited for."""
        if self._rank != 0:
            self.put(channel, number, f"heard-{self._rank}", b"")

    def wait_until_heard(self, deadline: float) -> None:
        """Let rank 0 wait until all ranks know how the last saves and rounds went, since the store may be gone soon."""
        if self._rank == 0:
            for channel, numbers in self._own.items():
                self.wait_for(channel, max(numbers), [f"heard-{rank}" for rank in range(1, self._ranks)], deadline)

    def close(self) -> None:
        """End all waits."""
        self._closed.set()

    def _name(self, channel: str, number: int, what: str) -> str:
        return f"{self._run}/{channel}/{number}/{what}"


class RankPart(CheckpointPart):
    """Files that one rank has written in a save, and its states; or why it could not."""

    error: str | None = None
    files: tuple[FileRecord, ...] = ()
    state: Any = None
    binary: Mapping[str, bytes] = Field(default_factory=dict)


class Index(CheckpointPart):
    """Content of the files of a checkpoint that have no tensors."""

    manifest: Manifest
    contents: dict[str, bytes]


def make_index(
    step: int, identity: str, saved_at: str, nodes: Sequence[str], parts: Sequence[RankPart], state: RunState
) -> Index:
    files: dict[str, list[FileRecord]] = defaultdict(list)
    for node, part in zip(nodes, parts, strict=True):
        files[node] += part.files
    contents = {
        f"part-{quote(node, safe='')}.json": NodePart(schema=SCHEMA, node=node, files=tuple(written))
        .model_dump_json(by_alias=True)
        .encode()
        for node, written in files.items()
    }
    places, states = [], b""
    for part in parts:
        own = {}
        for name, content in part.binary.items():
            own[name] = (len(states), len(content))
            states += content
        places.append(own)
    contents[STATES] = states
    manifest = Manifest(
        schema=SCHEMA,
        id=identity,
        step=step,
        epoch=state.epoch,
        saved_at=saved_at,
        held_by=None,
        plan=state.plan,
        world_size=len(parts),
        param_groups=state.param_groups,
        common=dict(state.common),
        ranks=tuple(part.state for part in parts),
        binary=tuple(places),
        files={name: FileCheck(bytes=len(data), crc32=checksum(data)) for name, data in sorted(contents.items())},
        crc32=0,
    )
    return Index(manifest=manifest, contents=contents)


@dataclass(frozen=True)
class Save:
    step: int
    number: int  # number of the save in this run, from 0; equal on all ranks
    state: RunState
    uploading: int | None = None  # the step that is being uploaded, and so must stay on local disks


@dataclass(frozen=True)
class Tier:
    """The folder of a tier: ``local``, that of this node, or ``shared``."""

    name: str
    folder: Path
    participants: Participants
    messages: MessageStore
    files: FileOperations
    keep: int
    time_limit_seconds: float

    @property
    def leader(self) -> int:
        return self.participants.leaders[self.participants.node] if self.name == "local" else 0

    @property
    def leaders(self) -> Sequence[int]:
        return sorted(self.participants.leaders.values()) if self.name == "local" else [0]

    def save(self, save: Save, write: Callable[[Path], Sequence[FileRecord]]) -> tuple[bool, str | None]:
        """True if all ranks have written their files; why the save is given up. Never raises because of files."""
        try:
            return self._save(save, write)
        finally:
            self.messages.say_heard(self.name, save.number)

    def _save(self, save: Save, write: Callable[[Path], Sequence[FileRecord]]) -> tuple[bool, str | None]:
        rank, leader = self.participants.rank, self.leader
        unfinished = self.folder / unfinished_folder(save.step, self.participants.run, save.number, leader)
        try:
            if rank == leader:
                in_use = unfinished_folder(save.step, self.participants.run, save.number, "")
                with suppress(OSError):  # leftovers take space but do no harm
                    remove_leftovers(self.files, self.folder, in_use)
            self.files.make_folder(unfinished)
            written = tuple(write(unfinished))
            part = RankPart(files=written, state=dict(save.state.rank), binary=save.state.binary)
            self._put(save, f"part-{rank}", part)
        except Exception as problem:  # of the disk, or of a state that is not JSON
            part = RankPart(error=self._in_words(problem))
            self._put(save, f"part-{rank}", part)
        error = self._decide(save, part) if rank == 0 else self._hear(save)
        if rank == leader:
            fault = error or self._finish(save, unfinished)
            self._put(save, f"done-{rank}", fault)
            if fault is not None:
                with suppress(OSError):  # another rank still writes there; the next save removes it
                    remove_all(self.files, unfinished)
        return error is None, error or self._errors_of_leaders(save)

    def _put(self, save: Save, what: str, message: CheckpointPart | str | None) -> None:
        text = message.model_dump_json(by_alias=True) if isinstance(message, CheckpointPart) else json.dumps(message)
        self.messages.put(self.name, save.number, what, text.encode())

    def _deadline(self) -> float:
        return time.monotonic() + self.time_limit_seconds

    def _decide(self, save: Save, own: RankPart) -> str | None:
        """Collect the parts on rank 0, and tell all ranks whether the save is whole, or why it is given up."""
        parts, error = self._collect(save, own)
        if error is None:
            try:
                identity = f"{self.participants.run}-{save.number}"
                index = make_index(save.step, identity, self._time(), self.participants.nodes, parts, save.state)
                self._put(save, "index", index)
            except Exception as fault:  # of the disk, or of a state that is not JSON
                error = self._in_words(fault)
        self._put(save, "verdict", error)
        return error

    def _collect(self, save: Save, own: RankPart) -> tuple[list[RankPart], str | None]:
        # Also after an error all parts are waited for: then nobody writes any more, and the leaders can clean up.
        deadline, parts, errors = self._deadline(), [own], [own.error]
        for rank in range(1, len(self.participants.nodes)):
            name = f"part-{rank}"
            message = self.messages.wait_for(self.name, save.number, [name], deadline).get(name)
            if message is None:
                where = f"rank {rank} on node {self.participants.nodes[rank]}"
                errors.append(f"{where} has not written its files in {self.time_limit_seconds:g} s")
            else:
                parts.append(RankPart.model_validate_json(message))
                errors.append(parts[-1].error)
        return parts, next((error for error in errors if error is not None), None)

    def _hear(self, save: Save) -> str | None:
        # Rank 0 may itself wait as long for the last part.
        deadline = self._deadline() + self.time_limit_seconds
        answers = self.messages.wait_for(self.name, save.number, ["verdict"], deadline)
        if not answers:
            return f"rank 0 has not answered in {2 * self.time_limit_seconds:g} s"
        error: str | None = json.loads(answers["verdict"])
        return error

    def _finish(self, save: Save, unfinished: Path) -> str | None:
        """Write the index, give the folder its name, remove old checkpoints. Returns what went wrong."""
        target = self.folder / step_folder(save.step)
        old = target.with_name(target.name + REPLACED)
        message = self.messages.get(self.name, save.number, "index")  # rank 0 has put it there before its verdict
        try:
            if message is None:
                raise CheckpointError("the index of the checkpoint was removed before it was read")
            index = Index.model_validate_json(message)
            held_by = self.participants.node if self.name == "local" else None
            manifest = index.manifest.model_copy(update={"held_by": held_by}).text().encode()
            for file, content in {**index.contents, MANIFEST: manifest}.items():
                write_file(self.files, unfinished / file, [memoryview(content)])
            self.files.sync_folder(unfinished)
            if target.exists():
                self._check_replaceable(target, save)
                remove_all(self.files, old)
                self.files.rename(target, old)
            try:
                self.files.rename(unfinished, target)
            except OSError:
                if target.exists():  # another node was faster
                    self._check_replaceable(target, save)
                raise
            self.files.sync_folder(self.folder)
        except Exception as error:
            return self._in_words(error)
        with suppress(OSError):  # the new checkpoint is whole; the next save tries again
            remove_all(self.files, old)
            used = {step for step in (save.uploading, save.step) if step is not None}
            remove_old(self.files, self.folder, self.keep, used)
        return None

    def _check_replaceable(self, target: Path, save: Save) -> None:
        if not is_complete(target):
            raise CheckpointError(f"{target} exists, but is not a complete checkpoint; remove it or rename it")
        try:
            manifest = read_manifest(target)
        except ValueError:
            return
        if manifest.id == f"{self.participants.run}-{save.number}":
            raise CheckpointError(
                f"{self.folder} is the local folder of node {manifest.held_by} and of node {self.participants.node}; "
                "each node needs a local folder of its own"
            )

    def _errors_of_leaders(self, save: Save) -> str | None:
        leaders = self.leaders if self.participants.rank == 0 else [self.leader]
        answers = self.messages.wait_for(
            self.name, save.number, [f"done-{leader}" for leader in leaders], self._deadline()
        )
        for leader in leaders:
            if f"done-{leader}" not in answers:
                return f"rank {leader} has not finished the folder of its node in {self.time_limit_seconds:g} s"
            error: str | None = json.loads(answers[f"done-{leader}"])
            if error is not None:
                return error
        return None

    def _time(self) -> str:
        """The time, but later than that of all checkpoints in this folder, whatever the clock says."""
        now = datetime.now(timezone.utc)
        saved = complete_folders(self.folder)
        if saved:
            now = max(now, datetime.fromisoformat(saved[-1][1].saved_at) + timedelta(microseconds=1))
        return now.isoformat(timespec="microseconds")

    def _in_words(self, error: Exception) -> str:
        text = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.filename or self.folder}: {error.strerror}"
        return f"{text} (rank {self.participants.rank}, node {self.participants.node})"
