"""A file with what one rank holds after a step, in memory that outlives the process, such as ``/dev/shm``.

[Note: memory files] A file is ``MAGIC``, the length of the header (8 bytes, little-endian), the header as JSON, and the
elements of each piece, each at a multiple of 64 bytes. It has no check sums and is not synchronized to a disk: it
outlives processes, not the machine. It gets its name when it is complete. Only this package writes and reads it.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...checkpoint.format.box import Box
from ...checkpoint.format.pieces import TensorPiece
from ...checkpoint.format.run_state import RunState
from ..state.held_layers import HeldLayers
from .newest_memory import FoundState, KeptBox, StateName

__all__ = ["KeptState", "MemoryFile", "read_memory_file", "write_memory_file"]

MAGIC = b"CHSTATE1"
ALIGNMENT = 64


@dataclass(frozen=True)
class KeptState:
    """What a rank holds after a step."""

    name: StateName
    tensors: tuple[str, ...]
    """Names of all parameters and buffers of the model."""
    layers: HeldLayers
    pieces: list[TensorPiece]
    kinds: dict[str, str]
    """See :func:`.optimizer_memory.state_entries`."""
    state: RunState


@dataclass(frozen=True)
class MemoryFile:
    """A complete file and its header."""

    path: Path
    found: FoundState
    layers: HeldLayers
    kinds: dict[str, str]
    state: RunState
    places: tuple[tuple[TensorPiece, int], ...]
    """The pieces, with empty tensors of their types, and where their elements start in the file."""

    def pieces(self) -> list[TensorPiece]:
        """What the rank held. The tensors are in the file's memory, which is read where it is used."""
        content = np.memmap(self.path, np.uint8, "c")
        pieces = []
        for piece, start in self.places:
            data = content[start : start + piece.box.numel * piece.data.element_size()]
            tensor = torch.from_numpy(data).view(piece.data.dtype).view(piece.box.sizes)
            pieces.append(TensorPiece(piece.layer, piece.key, piece.shape, piece.box, tensor, piece.shard))
        return pieces


def write_memory_file(
    path: Path, kept: KeptState, to_host: Callable[[Tensor], Iterable[Tensor]] = lambda tensor: [tensor.cpu()]
) -> None:
    """Write a file. Nothing of this name is there until all of it is written.

    Args:
        path: of the file.
        kept: what to write.
        to_host: copies a tensor to the host's memory, if it is not there; yields its elements row by row.

    Raises:
        OSError: for example if the memory is full.
    """
    starts, end = [], 0
    for piece in kept.pieces:
        starts.append(end)
        end = _aligned(end + piece.data.numel() * piece.data.element_size())
    header = json.dumps(_header(kept, starts, end)).encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb", buffering=0) as file:
            _write_at(file, 0, MAGIC + len(header).to_bytes(8, "little") + header)
            first = _aligned(len(MAGIC) + 8 + len(header))
            for piece, start in zip(kept.pieces, starts, strict=True):
                position = first + start
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
            header = json.loads(file.read(length))
        first = _aligned(len(MAGIC) + 8 + length)
        if path.stat().st_size != first + header["bytes"]:
            return None
        return _memory_file(path, header, first)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _header(kept: KeptState, starts: list[int], end: int) -> dict[str, Any]:
    state = kept.state
    return {
        "version": kept.name.version,
        "world": kept.name.world,
        "tensors": kept.tensors,
        "layers": kept.layers,
        "kinds": kept.kinds,
        "pieces": [
            [each.layer, each.key, each.shape, each.box.offsets, each.box.sizes, _type(each.data), each.shard, start]
            for each, start in zip(kept.pieces, starts, strict=True)
        ],
        "bytes": end,
        "epoch": state.epoch,
        "plan": state.plan,
        "param_groups": state.param_groups,
        "common": dict(state.common),
        "rank": dict(state.rank),
        "binary": {name: base64.b64encode(content).decode() for name, content in state.binary.items()},
    }


def _memory_file(path: Path, header: dict[str, Any], first: int) -> MemoryFile:
    places = []
    for layer, key, shape, offsets, sizes, kind, shard, start in header["pieces"]:
        empty = torch.empty(0, dtype=getattr(torch, kind))
        box = Box(tuple(offsets), tuple(sizes))
        places.append((TensorPiece(layer, key, tuple(shape), box, empty, shard), first + start))
    name = StateName(header["version"], header["world"])
    boxes = tuple(KeptBox(piece.key, piece.shape, piece.box) for piece, _ in places)
    ranges, part, parts = header["layers"]
    return MemoryFile(
        path,
        FoundState(name, tuple(header["tensors"]), boxes),
        HeldLayers(tuple((start, stop) for start, stop in ranges), part, parts),
        dict(header["kinds"]),
        RunState(
            epoch=header["epoch"],
            plan=header["plan"],
            param_groups=header["param_groups"],
            common=header["common"],
            rank=header["rank"],
            binary={name: base64.b64decode(content) for name, content in header["binary"].items()},
        ),
        tuple(places),
    )


def _write_at(file: Any, position: int, content: Any) -> None:
    file.seek(position)
    view = memoryview(content).cast("B") if len(content) else memoryview(b"")
    while view.nbytes:
        view = view[file.write(view) :]


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
