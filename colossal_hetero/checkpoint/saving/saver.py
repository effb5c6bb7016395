"""Saving layer checkpoints in the background: to a local disk of each node, to a shared folder, or to both."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from numpy import uint8
from numpy.typing import NDArray
from torch.distributed import Store

from ..format.names import layer_file, meeting_folder, step_folder
from ..format.pieces import TensorPiece
from ..format.records import FileRecord
from ..format.run_state import RunState
from ..storage.errors import CheckpointError
from ..storage.file_operations import FileOperations
from .file_division import ShardFile, divide_files
from .layer_files import copy_file, write_layer_file
from .meeting import FolderMeeting, Interruption, Meeting, MemoryMeeting, Stopped, StoreMeeting
from .participants import Participants, holdings_of
from .staging import StagingBuffer
from .tier import Save, Tier, Verdict
from .worker import Worker

__all__ = ["LayerCheckpointSaver"]

GRACE_SECONDS = 10.0
"""How long a rank may take to hear that a save has ended."""

EXIT_SECONDS = 60.0
"""How long a process that ends with an error waits for the last checkpoint."""

Staged = dict[ShardFile, list[tuple[TensorPiece, NDArray[uint8]]]]


class LayerCheckpointSaver:
    """Saves what all ranks hold, layer by layer. All ranks make one and call :meth:`save` equally often.

    With a local folder, :meth:`save` copies to host memory, and a thread writes from there. When the checkpoint is
    whole on all nodes, another thread copies each file once to the shared folder. While an upload runs, the next
    checkpoints are kept on local disks only. Without a local folder the first thread writes to the shared folder.

    What goes wrong in the background does not stop training: rank 0 prints one line, and :meth:`wait` raises an error.

    Args:
        participants: from :func:`.participants.gather_participants`.
        local: folder on a disk of this node, which no other node uses.
        shared: folder that all nodes see.
        keep: how many checkpoints each folder keeps. The newest is never removed.
        store: for messages between ranks, a client of its own: no other thread may use it. Without it, messages are
            files: in the local folder if all ranks are on one node, else in the shared folder. If that hangs, ranks
            without a store cannot tell each other.
        time_limit_seconds: how long ranks wait for each other, and for a write that hangs, before a save is given up.
        patience_seconds: how long after its start the writing of one save may hold up the next one.
        is_broken: whether other ranks are known to be lost. Then nobody waits for them, and the save is given up.
        files: operations on files.
        log: where rank 0 prints; default: standard error.

    Raises:
        ValueError: there is no folder, ``keep`` is below 1, or ranks on several nodes have no way to exchange messages.
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
        if local is None and shared is None:
            raise ValueError("a checkpoint needs a folder: give local, shared, or both")
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least 1 checkpoint must be kept")
        self._participants, self._log = participants, log
        self._time_limit, self._patience_seconds = time_limit_seconds, patience_seconds
        self._files = files or FileOperations()
        self._stop = Interruption(is_broken)
        division = divide_files(participants.holdings, with_local=local is not None)
        self._first_files = (division.local if local is not None else division.shared).get(participants.rank, ())
        self._uploads = division.shared.get(participants.rank, ())
        self._own_holdings = frozenset(each for each in participants.holdings if each.rank == participants.rank)
        self._meeting_folder: FolderMeeting | None = None
        meeting = self._make_meeting(store, local, shared)

        def tier(name: str, folder: Path | str) -> Tier:
            return Tier(
                name, Path(folder), participants, meeting, self._files, keep, time_limit_seconds, self._stop
            )  # fmt: skip

        self._first = tier("local", local) if local is not None else tier("shared", str(shared))
        self._second = tier("shared", shared) if local is not None and shared is not None else None
        self._staging = StagingBuffer()
        self._staging_free = threading.Event()
        self._staging_free.set()
        self._busy: dict[str, tuple[int, float]] = {}  # by tier: the step that this rank writes there, and since when
        self._waits_for_others = False
        self._reported: set[tuple[str, int]] = set()  # tiers and steps of writes that hang
        self._writer = Worker("checkpoint writer")
        self._uploader = Worker("checkpoint upload") if self._second is not None else None
        self._uploading: int | None = None
        self._number = 0
        self._failures: list[str] = []
        atexit.register(self._at_exit)

    def save(self, step: int, pieces: Sequence[TensorPiece], state: RunState | None = None) -> bool:
        """Save what this rank holds now; returns when it may change again.

        If this rank still writes the pieces of the save before, this waits for it, as long as the writing takes at most
        ``patience_seconds`` in all. If it takes longer, or if those pieces cannot be written yet, since a save before
        waits for other ranks, the new save is given up: no checkpoint of this step is made, on any rank.

        Args:
            step: number of optimizer steps that are done.
            pieces: what this rank holds: the boxes that the participants have told each other, in any order.
            state: of the run; what all ranks share is taken from rank 0.

        Returns:
            Whether this rank takes part. If not, the reason is printed on rank 0, and raised by :meth:`wait`.

        Raises:
            ValueError: the pieces are not those that the participants have told each other; or ``step`` is negative.
        """
        if step < 0:
            raise ValueError(f"step is {step}: it must be at least 0")
        self._check(pieces)
        save = Save(step, self._number, state or RunState())
        self._number += 1
        self._report_hang()
        if not self._staging_free.wait(self._patience()):
            self._give_up(save)
            return False
        wanted = set(self._first_files)
        own = [piece for piece in pieces if (piece.layer, piece.shard) in wanted]
        own.sort(key=lambda piece: (piece.layer, piece.shard, piece.key, piece.box))
        staged: Staged = {}
        for piece, copy in zip(own, self._staging.copy(own), strict=True):
            staged.setdefault(ShardFile(piece.layer, piece.shard), []).append((piece, copy))
        self._staging_free.clear()
        self._writer.submit(partial(self._write, save, staged))
        return True

    @property
    def is_idle(self) -> bool:
        """Whether everything is written and uploaded, or given up."""
        return self._writer.is_idle and (self._uploader is None or self._uploader.is_idle)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until everything is written and uploaded, but not for a write that is known to hang.

        Args:
            timeout_seconds: how long; default: twice the time limit, since a save and an upload may each take as long.

        Raises:
            CheckpointError: a save or an upload since the last call went wrong, or is not done.
        """
        deadline = time.monotonic() + (2 * self._time_limit if timeout_seconds is None else timeout_seconds)
        self._report_hang()
        done = self._writer.wait(0.0 if self._hangs(self._first) else deadline)
        if self._second is not None and self._uploader is not None:
            done &= self._uploader.wait(0.0 if self._hangs(self._second) else deadline)
        self._report_hang()
        failures, self._failures = self._failures, []
        if not done:
            failures.append("the last checkpoint is still being written")
        if failures:
            raise CheckpointError("; ".join(failures))

    def close(self, *, others_are_there: bool = True) -> None:
        """End the threads. What is not written by then is given up.

        Rank 0 first waits until the others know how the last save went. The store may end after this.

        Args:
            others_are_there: False if the other ranks may be gone, so that there is nobody to wait for.
        """
        atexit.unregister(self._at_exit)
        if others_are_there and self.is_idle:
            with suppress(Exception):  # other ranks, or the way to them, may be gone
                for tier in (self._first, self._second):
                    if tier is not None:
                        tier.wait_until_heard(time.monotonic() + min(GRACE_SECONDS, self._time_limit))
        self._stop.set()
        for worker in (self._writer, self._uploader):
            if worker is not None:
                worker.close()
                worker.wait(time.monotonic() + 1.0)
        if self._meeting_folder is not None and self._participants.rank == 0:
            self._meeting_folder.close()

    def _make_meeting(self, store: Store | None, local: Path | str | None, shared: Path | str | None) -> Meeting:
        if len(self._participants.nodes) == 1:
            return MemoryMeeting()
        if store is not None:
            return StoreMeeting(store)
        folder = local if len(set(self._participants.nodes)) == 1 and local is not None else shared
        if folder is None:
            raise ValueError(
                f"ranks on {len(set(self._participants.nodes))} nodes with local folders only need a store, e.g. a "
                "TCPStore, or a shared folder, to tell each other what they have written"
            )
        self._meeting_folder = FolderMeeting(Path(folder) / meeting_folder(self._participants.run), self._files)
        return self._meeting_folder

    def _check(self, pieces: Sequence[TensorPiece]) -> None:
        given = frozenset(holdings_of(self._participants.rank, self._participants.node, pieces))
        if given != self._own_holdings:
            other = min(given ^ self._own_holdings)
            word = "not announced" if other in given else "announced, but is missing"
            raise ValueError(
                f"elements {other.box.offsets} to +{other.box.sizes} of {other.key}, {other.bytes} bytes in shard "
                f"{other.shard} of {other.layer}: this piece was {word}; make "
                "another saver when what a rank holds has changed"
            )

    def _patience(self) -> float:
        """How long to wait for the staging buffer, in seconds."""
        if self._waits_for_others:
            return 0.0
        _, since = self._busy.get(self._first.name, (0, time.monotonic()))
        return max(0.0, since + self._patience_seconds - time.monotonic())

    def _give_up(self, save: Save) -> None:
        rank, node, busy = self._participants.rank, self._participants.node, self._busy.get(self._first.name)
        what = "waits for other ranks to save" if busy is None else f"still writes the checkpoint of step {busy[0]}"
        error = f"rank {rank} on node {node} {what}"
        self._fail(save, self._first, error, quiet=self._hangs(self._first))
        # In a thread: messages may be files in a folder that hangs.
        refuse = partial(self._first.refuse, save.number, error)
        threading.Thread(target=refuse, name="checkpoint message", daemon=True).start()

    def _write(self, save: Save, staged: Staged) -> None:
        """In the thread of the writer."""
        records: dict[str, FileRecord] = {}
        is_held = True  # the staging buffer still holds this save

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._staging_free.set()

        def write(folder: Path) -> list[FileRecord]:
            try:
                with self._writing(self._first, save):
                    self._staging.finish()
                    for file in self._first_files:
                        name = layer_file(*file)
                        records[name] = write_layer_file(self._files, folder / name, staged[file])
            finally:
                self._waits_for_others = True
                release()
            return list(records.values())

        verdict = self._take_part(self._first, save, partial(self._first.save, save, write, self._upload_next))
        self._waits_for_others = False
        release()  # also if the folder could not be made
        if verdict is not None and verdict.upload and self._second is not None and self._uploader is not None:
            # Rank 0 has finished its last upload; this rank may not have heard so yet.
            if self._second.name in self._busy or not self._uploader.wait(time.monotonic() + GRACE_SECONDS):
                where = f"rank {self._participants.rank} on node {self._participants.node}"
                error = f"{where} still uploads the checkpoint of step {self._uploading}"
                self._fail(save, self._second, error, quiet=True)
                with suppress(Exception):  # without messages, rank 0 gives up after the time limit
                    self._second.refuse(save.number, error)
            else:
                self._uploading = save.step
                self._uploader.submit(partial(self._upload, self._second, save, records))

    def _upload_next(self) -> tuple[bool, int | None]:
        """Rank 0: whether the save that is whole now is uploaded, and which step is being uploaded."""
        if self._uploader is None or not self._uploader.is_idle:
            return False, self._uploading
        return True, None

    def _upload(self, tier: Tier, save: Save, records: dict[str, FileRecord]) -> None:
        """In the thread of uploads."""
        source = self._first.folder / step_folder(save.step)

        def write(folder: Path) -> list[FileRecord]:
            uploaded = [records[layer_file(*file)] for file in self._uploads]
            with self._writing(tier, save):
                for record in uploaded:
                    copy_file(self._files, source / record.name, folder / record.name, record)
            return uploaded

        self._take_part(tier, save, partial(tier.save, save, write))
        self._uploading = None

    @contextmanager
    def _writing(self, tier: Tier, save: Save) -> Iterator[None]:
        self._busy[tier.name] = (save.step, time.monotonic())
        try:
            yield
        finally:
            del self._busy[tier.name]

    def _take_part(self, tier: Tier, save: Save, run: Callable[[], Verdict]) -> Verdict | None:
        """Run a save; None if it went wrong, which is noted."""
        try:
            verdict = run()
        except Stopped:
            if self._stop.is_broken():
                self._fail(save, tier, "a rank was lost")
            return None
        except Exception as error:  # e.g. the store is gone
            verdict = Verdict(str(error) or type(error).__name__, False, None)
        if verdict.error is None:
            return verdict
        self._fail(save, tier, verdict.error)
        return None

    def _fail(self, save: Save, tier: Tier, error: str, quiet: bool = False) -> None:
        text = f"no checkpoint of step {save.step} in the {tier.name} folder {tier.folder}: {error}"
        self._failures.append(text)
        if not quiet:
            self._print(text)

    def _hangs(self, tier: Tier) -> bool:
        """Whether a write of this rank is known to hang."""
        busy = self._busy.get(tier.name)
        return busy is not None and (tier.name, busy[0]) in self._reported

    def _report_hang(self) -> None:
        """Say once that a write of this rank hangs."""
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
            self.wait(EXIT_SECONDS if hasattr(sys, "last_value") else None)
        self.close()
