"""Saver of layer checkpoints in the background: to a local disk of each node, to a shared folder, or to both."""

from __future__ import annotations

import atexit
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from numpy import uint8
from numpy.typing import NDArray
from torch.distributed import Store

from .config import CheckpointError
from .layer_files import copy_file, write_layer_file
from .participants import Participants, ShardFile, divide_files
from .pieces import RunState, TensorPiece, layer_file, step_folder
from .records import FileRecord
from .staging import StagingBuffer, Worker
from .storage import FileOperations
from .tier import MessageStore, Save, Stopped, Tier

GRACE_SECONDS = 10.0  # time that a rank may take to hear that a save has ended
EXIT_SECONDS = 60.0  # time that a process that ends with an error waits for the last checkpoint
Staged = dict[ShardFile, list[tuple[TensorPiece, NDArray[uint8]]]]


class LayerCheckpointSaver:
    """Saves what all ranks hold, layer by layer. All ranks make one, and call its methods equally often.

    With a local folder, :meth:`save` copies to host memory, a thread writes from there, and when the checkpoint is
    whole on all nodes, another thread copies each file once to the shared folder. While an upload runs, the next
    checkpoints are kept on local disks only. A save that comes before all ranks have finished the one before is held in
    memory until the next one, or until :meth:`wait`. Errors in the background do not stop training: rank 0 prints a
    line, :meth:`wait` raises.
    """

    def __init__(
        self,
        participants: Participants,
        *,
        local: Path | str | None = None,
        shared: Path | str | None = None,
        keep: int = 3,
        store: Store | None = None,
        time_limit_seconds: float = 1800.0,
        patience_seconds: float = 60.0,
        is_broken: Callable[[], bool] = lambda: False,
        files: FileOperations | None = None,
        log: TextIO | None = None,
    ) -> None:
        if store is None and len(participants.nodes) > 1:
            raise ValueError(f"{len(participants.nodes)} ranks need a store to tell each other what they have written")
        self._participants, self._log = participants, log
        self._time_limit, self._patience_seconds = time_limit_seconds, patience_seconds
        self._files = files or FileOperations()
        division = divide_files(participants.holdings, with_local=local is not None)
        self._first_files = (division.local if local is not None else division.shared).get(participants.rank, ())
        self._uploads = division.shared.get(participants.rank, ())
        self._messages = MessageStore(store, participants.run, participants.rank, len(participants.nodes), is_broken)

        def tier(name: str, folder: Path | str) -> Tier:
            return Tier(name, Path(folder), participants, self._messages, self._files, keep, time_limit_seconds)

        self._first = tier("local", local) if local is not None else tier("shared", str(shared))
        self._second = tier("shared", shared) if local is not None and shared is not None else None
        self._staging = StagingBuffer()
        self._busy: dict[str, tuple[int, float]] = {}  # by tier: the step that this rank writes there, and since when
        self._reported: set[tuple[str, int]] = set()  # tiers and steps of writes that hang
        self._writer = Worker("checkpoint writer")
        self._uploader = Worker("checkpoint upload") if self._second is not None else None
        self._uploading: int | None = None
        self._number = self._rounds = 0
        self._since = 0.0  # when the last save began
        self._held: tuple[int, RunState, Staged, StagingBuffer] | None = None
        self._last: tuple[Save, dict[str, FileRecord]] | None = None  # the last save, if it is not uploaded
        self._last_step, self._is_written = -1, False
        self._told_about = -1  # the save during which others were skipped
        self._settled = True  # whether all ranks know how the last save went
        self._failures: list[str] = []
        atexit.register(self._at_exit)

    def is_ready(self) -> tuple[bool, bool]:
        """True if this rank has finished its saves, and its uploads. Waits for saves up to ``patience_seconds``."""
        self._report_hang()
        written = self._writer.wait(self._since + self._patience_seconds)
        return written, self._uploader is not None and self._uploader.is_idle

    def save(
        self, step: int, pieces: Sequence[TensorPiece], state: RunState | None = None, *, ready: tuple[bool, bool]
    ) -> bool:
        """Save what this rank holds now; false if it is held in memory until the next save or :meth:`wait`."""
        if step < 0:
            raise ValueError(f"step is {step}: it must be at least 0")
        written, uploaded = ready
        self._settled = False
        wanted = set(self._first_files)
        own = [piece for piece in pieces if (piece.layer, piece.shard) in wanted]
        own.sort(key=lambda piece: (piece.layer, piece.shard, piece.key, piece.box))
        # What is held is not in the memory that is being written from.
        staging = self._staging if written else (self._held[-1] if self._held else StagingBuffer())
        staged: Staged = {}
        for piece, copy in zip(own, staging.copy(own), strict=True):
            staged.setdefault(ShardFile(piece.layer, piece.shard), []).append((piece, copy))
        self._held = None
        if written:
            self._begin(step, state or RunState(), staged, staging, upload=uploaded)
        else:
            self._held = step, state or RunState(), staged, staging
            if self._told_about != self._last_step:
                self._told_about = self._last_step
                text = f"the checkpoint of step {self._last_step} is still being written on some rank"
                self._print(f"{text}; until it is, others are skipped, but not the last of the run")
        return written

    @property
    def is_idle(self) -> bool:
        return self._writer.is_idle and (self._uploader is None or self._uploader.is_idle)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Write and upload what is not yet, and wait for it, but not for a write that hangs. All ranks call it."""
        limit = 2 * self._time_limit if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + limit
        try:
            self._write_last(deadline)
            if not self._finished(deadline):
                self._failures.append("the last checkpoint is still being written")
            failures = self._agree(self._failures, deadline)
            self._settled = True
        except Stopped:
            failures = self._failures or ["a rank was lost"]
        except Exception as error:  # of the way to the other ranks
            failures = [*self._failures, f"other ranks cannot be reached: {str(error) or type(error).__name__}"]
        self._failures = []
        if failures:
            raise CheckpointError("; ".join(failures))

    def _write_last(self, deadline: float) -> None:
        """Write the save that is held, and upload the last one that is only on local disks."""
        if self._held is not None:
            done = self._writer.wait(0.0 if self._hangs(self._first) else deadline)
            (step, state, staged, staging), self._held = self._held, None
            late = [] if done else [f"no checkpoint of step {step}: that of step {self._last_step} is being written"]
            late = self._agree(late, deadline)
            if late:
                self._failures += late
            else:
                self._begin(step, state, staged, staging, upload=False)
        if self._second is not None and self._last is not None and self._uploader is not None:
            uploads = self._finished(deadline) and self._is_written
            late = self._agree([] if uploads else [f"step {self._last_step} is not in {self._second.folder}"], deadline)
            self._failures += late
            if not late:
                self._start_upload(*self._last)

    def _finished(self, deadline: float) -> bool:
        self._report_hang()
        done = self._writer.wait(0.0 if self._hangs(self._first) else deadline)
        if self._second is not None and self._uploader is not None:
            done &= self._uploader.wait(0.0 if self._hangs(self._second) else deadline)
        self._report_hang()
        return done

    def _agree(self, failures: list[str], deadline: float) -> list[str]:
        """The failures of the first rank that has any: the same on all ranks."""
        rank, ranks = self._participants.rank, range(len(self._participants.nodes))
        if len(ranks) == 1:
            return failures
        self._rounds += 1
        messages, number, late = self._messages, self._rounds, max(deadline, time.monotonic()) + GRACE_SECONDS
        if rank == 0:
            found = messages.wait_for("wait", number, [f"said-{each}" for each in ranks[1:]], late)
            for each in ranks[1:]:
                words = found.get(f"said-{each}")
                gone = [f"rank {each} does not wait for its checkpoints, or has ended"]
                failures = failures or (gone if words is None else json.loads(words))
            messages.put("wait", number, "answer", json.dumps(failures).encode())
            return failures
        messages.put("wait", number, f"said-{rank}", json.dumps(failures).encode())
        found = messages.wait_for("wait", number, ["answer"], late + GRACE_SECONDS)
        messages.say_heard("wait", number)
        if not found:
            return failures or ["rank 0 does not wait for its checkpoints, or has ended"]
        agreed: list[str] = json.loads(found["answer"])
        return agreed

    def close(self, *, others_are_there: bool = True) -> None:
        """End the threads; what is not written is given up. Rank 0 waits until others know how the last save went."""
        atexit.unregister(self._at_exit)
        if others_are_there and self.is_idle:
            with suppress(Exception):  # other ranks, or the way to them, may be gone
                self._messages.wait_until_heard(time.monotonic() + min(GRACE_SECONDS, self._time_limit))
        self._messages.close()
        for worker in (self._writer, self._uploader):
            if worker is not None:
                worker.close()

    def _begin(self, step: int, state: RunState, staged: Staged, staging: StagingBuffer, *, upload: bool) -> None:
        """Give a save to the thread that writes. All ranks have finished the one before."""
        if upload:
            self._uploading = None  # all ranks have finished the upload before
        save = Save(step, self._number, state, self._uploading)
        records: dict[str, FileRecord] = {}
        self._number += 1
        self._since, self._last_step = time.monotonic(), step
        self._last = None if upload else (save, records)
        self._uploading = step if upload else self._uploading
        self._writer.submit(partial(self._write, save, staged, staging, records, upload))

    def _write(
        self, save: Save, staged: Staged, staging: StagingBuffer, records: dict[str, FileRecord], upload: bool
    ) -> None:
        def write(folder: Path) -> list[FileRecord]:
            with self._writing(self._first, save):
                staging.finish()
                for file in self._first_files:
                    name = layer_file(*file)
                    records[name] = write_layer_file(self._files, folder / name, staged[file])
            return list(records.values())

        written = self._take_part(self._first, save, write)
        if written and upload:  # also if this node's folder could not be finished: others begin to upload
            self._start_upload(save, records)
        self._is_written = written

    def _start_upload(self, save: Save, records: dict[str, FileRecord]) -> None:
        if self._second is not None and self._uploader is not None:
            self._last, self._uploading = None, save.step
            self._uploader.submit(partial(self._upload, self._second, save, records))

    def _upload(self, tier: Tier, save: Save, records: dict[str, FileRecord]) -> None:
        source = self._first.folder / step_folder(save.step)

        def write(folder: Path) -> list[FileRecord]:
            uploaded = [records[layer_file(*file)] for file in self._uploads]
            with self._writing(tier, save):
                for record in uploaded:
                    copy_file(self._files, source / record.name, folder / record.name, record)
            return uploaded

        self._take_part(tier, save, write)

    @contextmanager
    def _writing(self, tier: Tier, save: Save) -> Iterator[None]:
        self._busy[tier.name] = (save.step, time.monotonic())
        try:
            yield
        finally:
            del self._busy[tier.name]

    def _take_part(self, tier: Tier, save: Save, write: Callable[[Path], list[FileRecord]]) -> bool:
        written = False
        try:
            written, error = tier.save(save, write)
        except Stopped:
            if self._messages.is_broken():
                self._fail(save, tier, "a rank was lost")
            return False
        except Exception as fault:  # e.g. the store is gone
            error = str(fault) or type(fault).__name__
        if error is not None:
            self._fail(save, tier, error)
        return written

    def _fail(self, save: Save, tier: Tier, error: str) -> None:
        text = f"no checkpoint of step {save.step} in the {tier.name} folder {tier.folder}: {error}"
        self._failures.append(text)
        self._print(text)

    def _hangs(self, tier: Tier) -> bool:
        busy = self._busy.get(tier.name)
        return busy is not None and (tier.name, busy[0]) in self._reported

    def _report_hang(self) -> None:
        for name, (step, since) in list(self._busy.items()):
            if time.monotonic() > since + self._time_limit and (name, step) not in self._reported:
                self._reported.add((name, step))
                tier = self._first if self._first.name == name else self._second
                text = (
                    f"writing the checkpoint of step {step} to the {name} folder {tier and tier.folder} takes more "
                    f"than {self._time_limit:g} s; later checkpoints are not written there until it ends"
                )
                self._failures.append(text)
                self._print(text)

    def _print(self, text: str) -> None:
        if self._participants.rank == 0:
            print(f"colossal_hetero: {text}; training goes on", file=self._log or sys.stderr, flush=True)

    def _at_exit(self) -> None:
        # After an error of the program, other ranks may be gone.
        with suppress(CheckpointError):  # rank 0 has printed it
            if not self._settled:
                self.wait(EXIT_SECONDS if hasattr(sys, "last_value") else None)
        self.close()
