"""Writing of the file of one shard of a layer, in the format of safetensors, and its copy to another folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from numpy import uint8
from numpy.typing import NDArray

from .pieces import Box, TensorPiece, whole
from .records import FileRecord, ItemRecord, checksum
from .storage import PIECE_BYTES, DamagedCopy, FileOperations, write_all, written

MAX_BOX_BYTES = 16 * 1024 * 1024
"""Bytes above which a box is written as several: each is read whole, since it has one check sum."""
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_Part = tuple[TensorPiece, Box, NDArray[uint8]]


class _CheckedStream:
    def __init__(self, files: FileOperations, descriptor: int) -> None:
        self._files, self._descriptor = files, descriptor
        self.bytes = 0
        self.crc32 = 0

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self.crc32 = checksum(piece, self.crc32)
            write_all(self._files, self._descriptor, piece)
        self.bytes += view.nbytes


def write_layer_file(
    files: FileOperations, path: Path, pieces: Sequence[tuple[TensorPiece, NDArray[uint8]]]
) -> FileRecord:
    """Write one file, which is on the disk when this returns.

    ``pieces`` are boxes of one layer, at least one, each with its bytes ``[bytes]``, row by row. No reader looks into
    the folder of ``path`` yet.
    """
    # The largest elements come first, so that each part starts at a multiple of its element's size.
    parts = sorted(_parts(pieces), key=lambda part: -part[0].data.element_size())
    with written(files, path) as descriptor:
        stream = _CheckedStream(files, descriptor)
        stream.write(_header(parts))
        items = []
        for piece, box, data in parts:
            item = ItemRecord(
                key=piece.key,
                dtype=str(piece.data.dtype).removeprefix("torch."),
                shape=tuple(piece.shape),
                offsets=box.offsets,
                sizes=box.sizes,
                start=stream.bytes,
                bytes=data.nbytes,
                crc32=checksum(data),
            )
            items.append(item)
            stream.write(data)
    layer = pieces[0][0].layer
    return FileRecord(name=path.name, layer=layer, items=tuple(items), bytes=stream.bytes, crc32=stream.crc32)


def _parts(pieces: Iterable[tuple[TensorPiece, NDArray[uint8]]]) -> Iterator[_Part]:
    for piece, content in pieces:
        element_bytes, start = piece.data.element_size(), 0
        for box in piece.box.pieces(MAX_BOX_BYTES // element_bytes):
            yield piece, box, content[start : start + box.numel * element_bytes]
            start += box.numel * element_bytes


def _header(parts: Sequence[_Part]) -> bytes:
    """Start of a file of safetensors: length of the JSON text as 8 bytes, and the text, padded to a multiple of 8."""
    entries, start = {}, 0
    for piece, box, data in parts:
        if piece.data.dtype not in TYPES:
            raise ValueError(f"{piece.key} is of type {piece.data.dtype}, which layer checkpoints cannot hold")
        name = piece.key
        if box != whole(tuple(piece.shape)):
            spans = (f"{first}:{first + size}" for first, size in zip(box.offsets, box.sizes, strict=True))
            name += f"[{','.join(spans)}]"
        offsets = [start, start + data.nbytes]
        entries[name] = {"dtype": TYPES[piece.data.dtype], "shape": list(box.sizes), "data_offsets": offsets}
        start += data.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def copy_file(files: FileOperations, source: Path, target: Path, record: FileRecord) -> None:
    """Copy a file, which is on the disk when this returns."""
    with written(files, target) as descriptor, open(source, "rb", buffering=0) as original:
        stream = _CheckedStream(files, descriptor)
        while content := original.read(PIECE_BYTES):
            stream.write(content)
    if stream.bytes != record.bytes:
        raise DamagedCopy(f"{os.fspath(source)} has {stream.bytes} bytes instead of {record.bytes}")
    if stream.crc32 != record.crc32:
        raise DamagedCopy(f"{os.fspath(source)} has another check sum than when it was written")
