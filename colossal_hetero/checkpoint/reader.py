"""Reader of layer checkpoints: the bytes that are needed, from the nearest whole copy."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .cells import CHECK_BYTES, aligned, check_sums, grid_box, grid_shape, runs, words
from .config import CheckpointError
from .found import Copy, FoundCheckpoint, Place, RepairablePlace, Search, content_of, find_checkpoints
from .pieces import STATES, Box, TensorPiece, cover
from .records import FileCheck, FileRecord, ItemRecord, Manifest
from .storage import DamagedCopy

__all__ = ["CheckpointReader", "LayerRead", "ReadAhead"]

SLAB_BYTES = 64 * 1024 * 1024
"""Bytes of a tensor that are read at a time."""


class CheckpointReader:
    """Reads checkpoints of any plan from the nearest whole copies. Several threads may call :meth:`load`."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = tuple(places)
        self._search: Search | None = None
        self._lock = threading.Lock()
        # Faults of files, as far as known, by place and file.
        self._faults: dict[tuple[str, str], str | None] = {}
        self._states: dict[str, bytes] = {}  # by checkpoint
        self.problems: list[str] = []
        """Copies that were found damaged, and what was done about it."""
        self.bytes_read = 0
        self.check_bytes_read = 0

    def checkpoints(self) -> tuple[FoundCheckpoint, ...]:
        """All checkpoints of which a place has a part; the last saved first, whatever their steps."""
        return self._found().checkpoints

    def latest(self) -> int:
        """Step of the newest checkpoint of which these places together have all files."""
        for checkpoint in self.checkpoints():
            if not checkpoint.faults():
                return checkpoint.step
        names = ", ".join(place.name for place in self._places)
        found = [f"step {each.step}: {each.faults()[0]}" for each in self.checkpoints()]
        reasons = "; ".join([*self._found().torn.values(), *found]) or "there is no folder of a checkpoint"
        raise CheckpointError(f"no complete checkpoint in {names}: {reasons}")

    def manifest(self, step: int) -> Manifest:
        return self._checkpoint(step).manifest

    def binary(self, step: int, rank: int) -> dict[str, bytes]:
        checkpoint = self._checkpoint(step)
        manifest = checkpoint.manifest
        if manifest.id not in self._states:
            self._states[manifest.id] = self._read_states(checkpoint)
        content = self._states[manifest.id]
        return {name: content[offset : offset + size] for name, (offset, size) in manifest.binary[rank].items()}

    def load(self, pieces: Sequence[TensorPiece], step: int) -> None:
        checkpoint = self._checkpoint(step)
        saved = _by_key(checkpoint)
        for piece in pieces:
            if piece.key not in saved:
                raise CheckpointError(f"the checkpoint of step {step} has no {piece.key}")
            self._load(checkpoint, piece, saved[piece.key])

    def tensors(self, step: int) -> dict[str, tuple[tuple[int, ...], torch.dtype, str]]:
        checkpoint = self._checkpoint(step)
        return {
            key: (records[0][1].shape, getattr(torch, records[0][1].dtype), records[0][0].layer)
            for key, records in sorted(_by_key(checkpoint).items())
        }

    def damaged(self, step: int) -> list[tuple[Copy, str]]:
        """Files that are damaged, as far as names, sizes and reading have shown: where, and their names."""
        copies = self._checkpoint(step).copies
        return [(copy, name) for copy in copies for name in (*copy.files, STATES) if self._fault(copy, name)]

    def whole(self, step: int, name: str, check: FileCheck) -> Copy | None:
        """The nearest copy of a file with this check sum that is not known to be damaged."""
        for copy in self._checkpoint(step).copies:
            if name == STATES or name in copy.files:
                own = copy.check(name)
                same = (own.bytes, own.crc32) == (check.bytes, check.crc32)
                if same and self._fault(copy, name) is None:
                    return copy
        return None

    def replace(self, bad: Copy, name: str, content: Iterable[memoryview], source: str) -> bool:
        file = f"{bad.place.name}/{bad.path(name)}"
        if not isinstance(bad.place, RepairablePlace):
            return False
        try:
            bad.place.replace(bad.path(name), content)
        except (OSError, DamagedCopy) as error:
            self.problems.append(f"{file} could not be replaced by that of {source}: {error}")
            return False
        self._faults[bad.place.name, bad.path(name)] = None
        self.problems.append(f"{file}: the damaged file was replaced by that of {source}")
        return True

    def _found(self) -> Search:
        if self._search is None:
            self._search = find_checkpoints(self._places)
            self.problems += self._search.torn.values()
        return self._search

    def _checkpoint(self, step: int) -> FoundCheckpoint:
        for checkpoint in self.checkpoints():
            if checkpoint.step == step:
                return checkpoint
        there = ", ".join(str(each.step) for each in self.checkpoints()) or "none"
        reasons = "".join(f"; {reason}" for reason in self._found().torn.values())
        raise CheckpointError(f"no checkpoint of step {step}; there are: {there}{reasons}")

    def _read_states(self, checkpoint: FoundCheckpoint) -> bytes:
        for copy in checkpoint.copies:
            if self._fault(copy, STATES) is None:
                try:
                    return b"".join(content_of(copy, STATES))
                except DamagedCopy as error:
                    self._note_fault(copy, STATES, str(error))
        reasons = [str(self._fault(copy, STATES)) for copy in checkpoint.copies]
        raise CheckpointError("; ".join([*reasons, "there is no other copy", *self._advice(checkpoint)]))

    def _load(
        self, checkpoint: FoundCheckpoint, piece: TensorPiece, saved: list[tuple[FileRecord, ItemRecord]]
    ) -> None:
        item = saved[0][1]
        dtype = getattr(torch, item.dtype)
        if item.shape != tuple(piece.shape) or dtype != piece.data.dtype:
            raise ValueError(
                f"{piece.key} was saved as {item.dtype} {list(item.shape)}, which cannot be loaded into "
                f"{str(piece.data.dtype).removeprefix('torch.')} {list(piece.shape)}"
            )
        # Nearest places first; of files in the same place, those that hold most of the box.
        nearest = {
            file.name: min(
                (
                    index
                    for index, copy in enumerate(checkpoint.copies)
                    if file.name in copy.files and self._fault(copy, file.name) is None
                ),
                default=len(checkpoint.copies),
            )
            for file, _ in saved
        }

        def preference(each: tuple[FileRecord, ItemRecord]) -> tuple[int, int]:
            common = piece.box.intersection(each[1].box)
            return nearest[each[0].name], -(common.numel if common else 0)

        saved = sorted(saved, key=preference)
        parts, left = cover(piece.box, [item.box for _, item in saved])
        if left:
            raise CheckpointError(
                f"the checkpoint of step {checkpoint.step} lacks elements {left[0].offsets} to +{left[0].sizes} of "
                f"{piece.key}"
            )
        with torch.no_grad():
            for index, part in parts:
                file, item = saved[index]
                target = piece.data[piece.box.slices_of(part)] if part.offsets else piece.data
                self._fill(checkpoint, file.name, item.key, item.box, part, target)

    def _fault(self, copy: Copy, name: str) -> str | None:
        where = copy.place.name, copy.path(name)
        with self._lock:
            if where not in self._faults:
                self._faults[where] = copy.fault(name)
                self.problems += filter(None, [self._faults[where]])
            return self._faults[where]

    def _note_fault(self, copy: Copy, name: str, fault: str) -> None:
        with self._lock:
            self._faults[copy.place.name, copy.path(name)] = fault
            self.problems.append(fault)

    def _fill(
        self, checkpoint: FoundCheckpoint, name: str, key: str, box: Box, part: Box, target: torch.Tensor
    ) -> None:
        for copy in checkpoint.copies_of(name):
            if self._fault(copy, name) is not None:
                continue
            record = copy.files[name]
            item = next(each for each in record.items if each.key == key and each.box == box)
            try:
                self._read(copy, record, item, part.moved(box.offsets), target)
                return
            except DamagedCopy as error:
                self._note_fault(copy, name, str(error))
        reasons = [str(self._fault(copy, name)) for copy in checkpoint.copies_of(name)]
        reasons = reasons or [f"{name} of step {checkpoint.step} is in none of the given places"]
        raise CheckpointError("; ".join([*reasons, "there is no other copy", *self._advice(checkpoint)]))

    def _read(self, copy: Copy, record: FileRecord, item: ItemRecord, part: Box, target: torch.Tensor) -> None:
        """Read a box of an item, in its own offsets, into ``target``, and check it."""
        cells, sizes = item.cells, item.sizes
        dtype = getattr(torch, item.dtype)
        for slab in _slabs(aligned(part, sizes, cells), cells, item.element_bytes):
            offsets, length = runs(sizes, slab, item.element_bytes)
            data = copy.place.read(copy.path(record.name), offsets + item.data_offset, length)
            grid, block = grid_shape(sizes, cells), grid_box(slab, cells)
            offsets, length = runs(grid, block, CHECK_BYTES)
            stored = copy.place.read(copy.path(record.name), offsets + item.checks_offset, length)
            with self._lock:
                self.bytes_read += data.nbytes
                self.check_bytes_read += stored.nbytes
            sums = check_sums(words(data, slab.sizes, item.element_bytes), cells, item.element_bytes)
            if not np.array_equal(sums.reshape(-1), stored.view("<u4")):
                raise DamagedCopy(
                    f"{copy.place.name}/{copy.path(record.name)} is damaged: the check sum of elements {slab.offsets} "
                    f"to +{slab.sizes} of the part of {item.key} in it differs"
                )
            wanted = part.intersection(slab) if part.offsets else part
            assert wanted is not None
            values = torch.from_numpy(data).view(dtype).view(slab.sizes)
            if not part.offsets:
                target.copy_(values)
            else:
                target[part.slices_of(wanted)].copy_(values[slab.slices_of(wanted)])

    def _advice(self, checkpoint: FoundCheckpoint) -> list[str]:
        others = [each for each in self.checkpoints() if each is not checkpoint]
        whole = [f"the checkpoint of step {each.step} is complete: load that" for each in others if not each.faults()]
        return whole[:1] or ["no other checkpoint is complete"] * bool(others)


def _by_key(checkpoint: FoundCheckpoint) -> dict[str, list[tuple[FileRecord, ItemRecord]]]:
    saved: dict[str, list[tuple[FileRecord, ItemRecord]]] = {}
    for record in checkpoint.files.values():
        for item in record.items:
            saved.setdefault(item.key, []).append((record, item))
    return saved


def _slabs(box: Box, cells: tuple[int, ...], element_bytes: int) -> Iterator[Box]:
    if not box.sizes:
        yield box
        return
    row_bytes = math.prod(box.sizes[1:]) * element_bytes
    rows = max(1, SLAB_BYTES // max(1, row_bytes * cells[0])) * cells[0]
    for start in range(0, box.sizes[0], rows):
        size = min(rows, box.sizes[0] - start)
        yield Box((box.offsets[0] + start, *box.offsets[1:]), (size, *box.sizes[1:]))


# Read ahead ----------------------------------------------------------------------------------------------------------


class LayerRead(NamedTuple):
    layer: str
    is_sent: bool
    """True if this takes memory until it is sent."""
    read: Callable[[], None]


class ReadAhead:
    """Thread that reads from one place. Leave its ``with`` block to stop it."""

    def __init__(self, layers: Sequence[LayerRead], ahead: int) -> None:
        self._layers = layers
        self._done = {layer.layer: threading.Event() for layer in layers}
        self._sent = {layer.layer for layer in layers if layer.is_sent}
        self._room = threading.Semaphore(ahead)
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="read checkpoint", daemon=True)
        self.problems: dict[str, str] = {}
        """Reasons why layers could not be read."""

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._room.release()

    def wait(self, layer: str) -> str | None:
        """Wait until a layer is read: None, or why it could not be read. None if there is nothing to read of it."""
        if layer not in self._done:
            return None
        self._done[layer].wait()
        if self._error is not None:
            raise self._error
        return self.problems.get(layer)

    def has_sent(self, layer: str) -> None:
        if layer in self._sent:
            self._room.release()

    def wait_for_all(self) -> None:
        for layer in self._done:
            self.wait(layer)

    def _run(self) -> None:
        try:
            for layer in self._layers:
                if layer.is_sent:
                    self._room.acquire()
                if self._stopped:
                    return
                try:
                    layer.read()
                except CheckpointError as error:
                    self.problems[layer.layer] = str(error)
                self._done[layer.layer].set()
        except BaseException as error:  # raised where somebody waits
            self._error = error
            for done in self._done.values():
                done.set()
