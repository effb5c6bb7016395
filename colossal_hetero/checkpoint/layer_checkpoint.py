"""Saving and loading of a boosted model's layers, together with everything else that training needs."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..common.ranks import of_every_rank, on_every_rank, own_address
from .config import CheckpointConfig, CheckpointError
from .exchange import BoxMemory, Outcome, fetch_boxes
from .held_pieces import agreed_buffers, pieces_of
from .layer_files import TYPES
from .participants import Participants, gather_participants, holdings_of
from .pieces import STATES, Bitmap, Location, RunState, StorageTier, TensorPiece, step_of
from .places import Checkpoint, Copy, NodeCopy, Place, find_checkpoints, newest_whole
from .reader import CheckpointReader
from .records import FileCheck
from .restoring import Restoring, wait_for_parameters
from .run_states import Training, check_loader, check_optimizer, restore_run, run_state_of
from .saver import LayerCheckpointSaver
from .storage import DamagedCopy
from .transfers import Need, choose_sources


class _Damaged(NamedTuple):
    rank: int
    node: str
    path: str
    name: str
    check: FileCheck


def repair(reader: CheckpointReader, nodes: Sequence[str]) -> None:
    """Replace damaged files by whole copies of another folder or node, if possible. Every rank calls it."""
    rank = dist.get_rank()
    left: dict[str, tuple[Copy, str]] = {}
    for bad, name in reader.damaged():
        good = reader.whole(name, bad.check(name))
        if good is None or not reader.replace(bad, name, good.content(name), good.place.name):
            left[bad.full_name(name)] = bad, name
    own = [_Damaged(rank, nodes[rank], path, name, bad.check(name)) for path, (bad, name) in left.items()]
    requests = of_every_rank(own)
    first = {(each.node, each.path): each for of_rank in reversed(requests) for each in of_rank}
    for request in sorted(first.values(), key=lambda each: (each.rank, each.path)):
        # A rank that has a whole copy and still asks could not write it.
        good = None if rank == request.rank else reader.whole(request.name, request.check)
        offers = of_every_rank(good is not None)
        if not any(offers):
            continue
        sender = offers.index(True)
        if rank == sender:
            assert good is not None
            _send(good, request)
        elif rank == request.rank:
            bad, name = left[request.path]
            pieces = _receive(sender)
            reader.replace(bad, name, pieces, f"node {nodes[sender]}")
            with suppress(DamagedCopy):
                deque(pieces, maxlen=0)  # if the file could not be written, the rest is on its way all the same


def _send(good: Copy, request: _Damaged) -> None:
    end: str | None = None
    try:
        for piece in good.content(request.name):
            dist.send_object_list([bytes(piece)], request.rank)
    except DamagedCopy as error:
        end = str(error)
    dist.send_object_list([end], request.rank)


def _receive(sender: int) -> Iterator[memoryview]:
    while True:
        received: list[Any] = [None]
        dist.recv_object_list(received, sender)
        if not isinstance(received[0], bytes):
            break
        yield memoryview(received[0])
    if received[0] is not None:
        raise DamagedCopy(received[0])


def load_pieces(
    pieces: Sequence[TensorPiece], copies: Sequence[NodeCopy], reader: CheckpointReader, nodes: Sequence[str]
) -> int:
    """Fill the pieces of this rank; returns the bytes received from other ranks. Every rank calls it.

    Each box comes from the nearest place: the disk of this node, disks of other nodes, the shared folder. All are read
    at the same time; what is read once is sent to all that need it. If a file is damaged, another copy is used.
    """
    checkpoint = reader.checkpoint
    as_saved = [_as_saved(piece, checkpoint.dtypes) for piece in pieces]
    memory = BoxMemory(as_saved, checkpoint.shapes, checkpoint.dtypes)
    bitmap = _bitmap(copies, checkpoint, set(nodes))
    node_of = dict(enumerate(nodes))
    outcome = Outcome([], [Need(each.layer, each.key, each.box, each.data.element_size()) for each in as_saved])
    received, problems = 0, list[str]()
    while True:
        outcomes = of_every_rank(outcome)
        for layer, location, problem in (each for of_rank in outcomes for each in of_rank.problems):
            bitmap.discard(layer, location)
            problems.append(problem)
        needs = {rank: of_rank.left for rank, of_rank in enumerate(outcomes)}
        if not any(needs.values()):
            break
        try:
            fetches = choose_sources(needs, node_of, bitmap)
        except LookupError as error:
            raise CheckpointError("; ".join([*problems, str(error)])) from None
        outcome = fetch_boxes(fetches, node_of, memory, reader.load)
        received += outcome.received_bytes
        for _, _, problem in outcome.problems:
            warnings.warn(f"a checkpoint is damaged: {problem}; other copies are looked for", stacklevel=2)
    for piece, saved in zip(pieces, as_saved, strict=True):
        if saved is not piece:
            piece.data.copy_(saved.data)
    return received


def _as_saved(piece: TensorPiece, dtypes: Mapping[str, str]) -> TensorPiece:
    dtype = getattr(torch, dtypes[piece.key])
    if piece.data.dtype == dtype:
        return piece
    return replace(piece, data=torch.empty(piece.box.sizes, dtype=dtype))


def _bitmap(copies: Sequence[NodeCopy], checkpoint: Checkpoint, nodes: set[str]) -> Bitmap:
    bitmap = Bitmap(checkpoint.step)
    for copy in copies:
        if copy.node and copy.node not in nodes:
            continue
        location = Location(copy.node, StorageTier.DISK if copy.node else StorageTier.SHARED)
        for file in (checkpoint.files[name] for name in copy.files - {STATES}):
            for item in file.items:
                bitmap.add(file.layer, item.key, item.box, location)
    return bitmap


STORE_SECONDS = 60.0

LOST_SECONDS = 10.0  # time until a rank is known to be lost, at most


@dataclass(frozen=True)
class Start:
    """State from which training continues. Bytes are this rank's: read from files, and received from other ranks."""

    step: int = 0  # number of optimizer steps that are done
    epoch: int = 0
    """Epoch to continue with. The loader begins it after the batches that were trained on."""
    same_plan: bool = False
    """True if every rank has the same part of the model as in the run that saved. Then the run continues bit for bit as
    without the interruption; otherwise sums are in another order, and dropout draws other masks."""
    read_bytes: int = 0
    received_bytes: int = 0


class LayerCheckpoint:
    """Saves and loads layer checkpoints. All ranks call its methods equally often."""

    def __init__(self, config: CheckpointConfig, is_broken: Callable[[], bool] | None = None) -> None:
        self._config, self._is_broken = config, is_broken
        self._saver: LayerCheckpointSaver | None = None
        self._participants: Participants | None = None
        self._store: dist.Store | None = None

    def save(self, training: Training, *, step: int, epoch: int, plan: str) -> bool:
        """Save; false if what is to be saved is held until the next save or :meth:`wait`."""
        wait_for_parameters(training.optimizer)
        outline = training.outline
        pieces = agreed_buffers(pieces_of(training.model, training.optimizer, outline), outline)
        for piece in pieces:
            if piece.data.dtype not in TYPES:
                known = ", ".join(str(each).removeprefix("torch.") for each in TYPES)
                raise ValueError(f"{piece.key} is of {piece.data.dtype}, which no file of safetensors has; use {known}")
        state = run_state_of(training, pieces, epoch=epoch, plan=plan)
        saver, ready = self._saver_of(pieces)
        return saver.save(step, pieces, state, ready=ready)

    def resume(self, training: Training, step: int | None = None) -> Start:
        """Load the newest whole checkpoint, or that of a step."""
        check_loader(training.loader)
        self.wait()
        own, copies, nodes, torn = self._everyones_copies()
        damaged: list[str] = []  # the same on all ranks
        while True:
            try:
                found, skipped = newest_whole(copies, step)
            except FileNotFoundError as error:
                raise CheckpointError("; ".join([*damaged, str(error)])) from None
            if not found:
                if damaged or torn:
                    reasons = "; ".join([*damaged, *torn.values()])
                    raise CheckpointError(f"no checkpoint is whole: {reasons}. Name another folder to begin anew")
                return Start()
            newest = found[0]
            try:
                reader, states = _open(own.get(newest.id), newest.step)
                saved = reader.checkpoint
                check_optimizer(training.optimizer, saved.manifest.common["optimizer"])
                restoring = Restoring(training, saved.shapes, saved.manifest.common["state"])
                received = load_pieces(restoring.pieces, found, reader, nodes)
                break
            except CheckpointError as error:  # on all ranks
                damaged.append(f"that of step {newest.step} is damaged: {error}")
                copies = [copy for copy in copies if copy.id != newest.id]
                if step is not None:
                    raise
        torn = {number: why for number, why in torn.items() if number > newest.step}
        lost = [*damaged, *skipped, *(f"that of step {number}: {why}" for number, why in sorted(torn.items()))]
        if lost and dist.get_rank() == 0:
            warnings.warn(
                f"a newer checkpoint is not whole and not loaded: {'; '.join(lost)}. Training continues from that of "
                f"step {newest.step}; what came after it is trained again",
                stacklevel=2,
            )
        repair(reader, nodes)
        for problem in reader.problems:
            warnings.warn(f"a checkpoint is damaged: {problem}", stacklevel=2)
        restoring.finish()
        same = restore_run(training, restoring.pieces, states, step=newest.step)
        return Start(newest.step, saved.manifest.epoch, same, reader.bytes_read, received)

    def newest_step(self, step: int | None = None) -> int | None:
        """Step of the checkpoint that :meth:`resume` would load; None without a whole one. Every rank calls it."""
        _, copies, *_ = self._everyones_copies()
        try:
            found, _ = newest_whole(copies, step)
        except FileNotFoundError:
            return None
        return found[0].step if found else None

    def _everyones_copies(self) -> tuple[dict[str, Checkpoint], list[NodeCopy], list[str], dict[int, str]]:
        """Checkpoints that this rank finds, by identity; copies that all ranks find; the node of each rank; by step,
        why folders are no checkpoints."""
        node = self._config.node or socket.gethostname()
        roots = (node, self._config.local), ("", self._config.shared)
        places = {name: Place(root) for name, root in roots if root is not None}
        own: dict[str, Checkpoint] = {}

        def look() -> tuple[str, list[NodeCopy], dict[int, str]]:
            search = find_checkpoints(list(places.values()))
            own.update((each.manifest.id, each) for each in search.checkpoints)
            names = {place: name for name, place in places.items()}
            copies = [NodeCopy.of(copy, names[copy.place]) for each in search.checkpoints for copy in each.copies]
            return node, copies, {step_of(Path(folder).name) or 0: reason for folder, reason in search.torn.items()}

        everyone = on_every_rank(look, "looking for checkpoints")
        copies = [copy for _, found, _ in everyone for copy in found]
        torn = {step: why for *_, of_rank in everyone for step, why in of_rank.items()}
        whole = {copy.step for copy in copies}
        return own, copies, [name for name, *_ in everyone], {step: torn[step] for step in torn.keys() - whole}

    def give_up(self) -> None:
        """End the threads that write; other ranks may be gone. What is not written is not there."""
        if self._saver is not None:
            self._saver.close(others_are_there=False)

    def wait(self) -> None:
        if self._saver is not None:
            try:
                self._saver.wait()
            except CheckpointError:
                if not self._is_soon_broken():
                    raise

    def _is_soon_broken(self) -> bool:
        """True if ranks are lost. A write may fail before that is known, e.g. if a lost rank's memory had messages."""
        deadline = time.monotonic() + LOST_SECONDS
        while self._is_broken is not None and time.monotonic() < deadline:
            if self._is_broken():
                return True
            time.sleep(0.05)
        return False

    def _saver_of(self, pieces: Sequence[TensorPiece]) -> tuple[LayerCheckpointSaver, tuple[bool, bool]]:
        """The saver of these pieces, a new one if a rank holds others now; whether all ranks saved and uploaded."""
        own, ready = None, (True, True)
        if self._participants is not None and self._saver is not None:
            rank, node = self._participants.rank, self._participants.node
            own = {each for each in self._participants.holdings if each.rank == rank} == set(
                holdings_of(rank, node, pieces)
            )
            ready = self._saver.is_ready()
        everyone = on_every_rank(lambda: (own, *ready), "saving a checkpoint")
        same, *ready_ranks = zip(*everyone, strict=True)
        if all(same):
            ready = all(ready_ranks[0]), all(ready_ranks[1])
        else:
            ready = True, True
            if self._saver is not None:
                with suppress(CheckpointError):  # rank 0 has printed it
                    self._saver.wait()
                self._saver.close()
            if self._store is None:
                self._store = _new_store()
            self._participants = gather_participants(pieces, self._config.node)
            config = self._config
            self._saver = LayerCheckpointSaver(
                self._participants,
                local=config.local,
                shared=config.shared,
                keep=config.keep,
                store=self._store,
                is_broken=self._is_broken or (lambda: False),
            )
        assert self._saver is not None
        return self._saver, ready


def _open(own: Checkpoint | None, step: int) -> tuple[CheckpointReader, list[RunState]]:
    """A reader, and the states of all ranks that saved; from another rank if this one has no whole copy of them."""
    reader = None if own is None else CheckpointReader(own)
    states: list[RunState] = []
    problem = ""
    try:
        states = [] if reader is None else reader.states()
    except CheckpointError as error:
        problem = str(error)
    outcomes = on_every_rank(lambda: (bool(states), problem), f"reading the index of step {step}")
    complete = [is_complete for is_complete, _ in outcomes]
    if not any(complete):
        raise CheckpointError("; ".join(problem for _, problem in outcomes if problem))
    if not all(complete):
        sent: list[Any] = [None if own is None else replace(own, copies=()), states]
        dist.broadcast_object_list(sent, src=complete.index(True))
        reader, states = reader or CheckpointReader(sent[0]), states or sent[1]
    if problem:
        warnings.warn(f"a checkpoint is damaged: {problem}; read from another node instead", stacklevel=3)
    assert reader is not None
    return reader, states


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::1"))


def _new_store() -> dist.Store | None:
    """Store of threads that save, which must not use the default one; None for one rank."""
    if dist.get_world_size() == 1:
        return None
    timeout = timedelta(seconds=STORE_SECONDS)
    place: list[Any] = [None, None]
    store: dist.Store | None = None
    if dist.get_rank() == 0:
        # In elastic training rank 0 need not be on the machine of MASTER_ADDR.
        own = own_address()
        address = os.environ.get("MASTER_ADDR", own) if _is_loopback(own) else own
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        place = [address, store.port]
    dist.broadcast_object_list(place, src=0)
    address, port = place
    return store or dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
