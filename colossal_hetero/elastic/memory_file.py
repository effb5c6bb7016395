"""File with what one rank holds after a step, in memory that outlives the process, such as ``/dev/shm``.

[Note: memory files] A file is ``MAGIC``, the length of the header (8 bytes, little-endian), the header as JSON, and the
elements of each piece, each at a multiple of 64 bytes. It has no check sums and is not synchronized to a disk: it
outlives processes, not the machine. It gets its name when it is complete. Only this package writes and reads it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.pieces import Box, RunState, TensorPiece, cover, whole
from ..checkpoint.records import CheckpointPart
from .environment import runs_launcher
from .held_layers import HeldLayers


class StateName(NamedTuple):
    """The state of the whole model after ``version`` optimizer steps, as one world has made it."""

    version: int
    world: str  # name of the world that wrote it; later worlds come later in the alphabet


class KeptBox(NamedTuple):
    """A box of a tensor in a file, see :class:`~.pieces.TensorPiece`."""

    key: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class FoundState:
    """Content of a file: the part of a state that one rank held."""

    name: StateName
    tensors: tuple[str, ...]  # names of all parameters and buffers of the model, also those that are not in this file
    boxes: tuple[KeptBox, ...]


def newest_whole_state(found: Iterable[FoundState]) -> StateName | None:
    """The newest state of which all elements are in some file; None if no state is whole.

    Files of different worlds are never mixed: a step that was done again, with another plan, is equal up to the order
    of sums only.
    """
    by_name: dict[StateName, list[FoundState]] = {}
    for each in found:
        by_name.setdefault(each.name, []).append(each)
    return next((name for name in sorted(by_name, reverse=True) if _is_whole(by_name[name])), None)


def _is_whole(parts: Sequence[FoundState]) -> bool:
    boxes: dict[tuple[str, tuple[int, ...]], set[Box]] = {}
    for part in parts:
        for key, shape, box in part.boxes:
            boxes.setdefault((key, shape), set()).add(box)
    keys = {key for key, _ in boxes}
    if any(f"param.{name}" not in keys and f"buffer.{name}" not in keys for name in parts[0].tensors):
        return False
    return not any(cover(whole(shape), sorted(held))[1] for (_, shape), held in boxes.items())


MAGIC = b"CHSTATE1"
ALIGNMENT = 64


class _Piece(NamedTuple):
    layer: str
    key: str
    shape: tuple[int, ...]
    box: Box
    dtype: str
    shard: str
    start: int


class _Header(CheckpointPart):
    name: StateName
    tensors: tuple[str, ...]
    layers: HeldLayers
    kinds: dict[str, str]
    pieces: tuple[_Piece, ...]
    bytes: int
    state: RunState


@dataclass(frozen=True)
class KeptState:
    name: StateName
    tensors: tuple[str, ...]
    layers: HeldLayers
    pieces: list[TensorPiece]
    kinds: dict[str, str]
    state: RunState


@dataclass(frozen=True)
class MemoryFile:
    path: Path
    found: FoundState
    layers: HeldLayers
    kinds: dict[str, str]
    state: RunState
    kept: tuple[_Piece, ...]
    first: int

    def pieces(self) -> list[TensorPiece]:
        """Pieces that the rank held. The tensors are in the file's memory, which is read where it is used."""
        content = np.memmap(self.path, np.uint8, "c")
        pieces = []
        for layer, key, shape, box, dtype, shard, start in self.kept:
            kind, begin = getattr(torch, dtype), self.first + start
            data = content[begin : begin + box.numel * kind.itemsize]
            tensor = torch.from_numpy(data).view(kind).view(box.sizes)
            pieces.append(TensorPiece(layer, key, shape, box, tensor, shard))
        return pieces


def write_memory_file(
    path: Path, kept: KeptState, to_host: Callable[[Tensor], Iterable[Tensor]] = lambda tensor: [tensor.cpu()]
) -> None:
    """Write a file. Nothing of this name is there until all of it is written."""
    pieces, end = [], 0
    for piece in kept.pieces:
        kind = str(piece.data.dtype).removeprefix("torch.")
        pieces.append(_Piece(piece.layer, piece.key, piece.shape, piece.box, kind, piece.shard, end))
        end = _aligned(end + piece.data.numel() * piece.data.element_size())
    header = _Header(
        name=kept.name,
        tensors=kept.tensors,
        layers=kept.layers,
        kinds=kept.kinds,
        pieces=tuple(pieces),
        bytes=end,
        state=kept.state,
    )
    text = header.model_dump_json().encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb", buffering=0) as file:
            _write_at(file, 0, MAGIC + len(text).to_bytes(8, "little") + text)
            first = _aligned(len(MAGIC) + 8 + len(text))
            for piece, place in zip(kept.pieces, pieces, strict=True):
                position = first + place.start
                for part in to_host(piece.data.detach()):
                    data = part.contiguous().reshape(-1).view(torch.uint8)
                    _write_at(file, position, data.numpy())
                    position += data.numel()
            file.truncate(first + end)
        temporary.rename(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def read_memory_file(path: Path) -> MemoryFile | None:
    """Read the header of a file; None if the file is not complete or of another version of this package."""
    try:
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return None
            length = int.from_bytes(file.read(8), "little")
            header = _Header.model_validate_json(file.read(length))
        first = _aligned(len(MAGIC) + 8 + length)
        if path.stat().st_size != first + header.bytes:
            return None
    except (OSError, ValueError):
        return None
    boxes = tuple(KeptBox(each.key, each.shape, each.box) for each in header.pieces)
    found = FoundState(header.name, header.tensors, boxes)
    return MemoryFile(path, found, header.layers, header.kinds, header.state, header.pieces, first)


def _write_at(file: Any, position: int, content: Any) -> None:
    file.seek(position)
    view = memoryview(content).cast("B") if len(content) else memoryview(b"")
    while view.nbytes:
        view = view[file.write(view) :]


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


SUFFIX = "state"


def default_memory() -> Path:
    """Default folder of memory files: in the machine's memory, separate for each user."""
    return Path("/dev/shm") / f"colossal_hetero-{os.getuid()}"


class FileName(NamedTuple):
    state: StateName
    slot: int  # number, on its node, of the worker that wrote it

    def __str__(self) -> str:
        return f"{self.state.world}.{self.state.version:08d}.{self.slot}.{SUFFIX}"


class MemoryFolder:
    """Files of one job on one node. Files of other jobs are never looked at."""

    def __init__(self, root: Path | str, job: str, node: str) -> None:
        self._root = Path(root)
        self.path = self._root / quote(job, safe="") / quote(node, safe="")

    def prepare(self) -> None:
        """Make the folder, and remove those of jobs whose launcher, after which they are named, has ended."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ValueError(
                f"memory={str(self._root)!r}: {error.strerror}; give a folder in memory that can be written, such as "
                "/dev/shm/NAME, in ElasticConfig(memory=...)"
            ) from None
        for folder in self._root.iterdir():
            if not runs_launcher(folder.name):
                shutil.rmtree(folder, ignore_errors=True)

    def files(self) -> list[FileName]:
        found = []
        with suppress(FileNotFoundError):
            for entry in os.scandir(self.path):
                world, *rest = entry.name.split(".")
                if world and len(rest) == 3 and rest[2] == SUFFIX:
                    found.append(FileName(StateName(int(rest[0]), world), int(rest[1])))
        return sorted(found)

    def file(self, name: FileName) -> Path:
        return self.path / str(name)

    def remove(self, name: FileName) -> None:
        self.file(name).unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Remove all files of the job on this node, and folders that are empty then."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # other nodes on the same machine, or other jobs
            self.path.parent.rmdir()
            self._root.rmdir()
