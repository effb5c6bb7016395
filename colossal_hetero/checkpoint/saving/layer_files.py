"""Writing the file of one shard of a layer, and copying it to another folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy import uint8
from numpy.typing import NDArray

from ..format.archive import write_tensor
from ..format.cells import cell_sizes, check_sums, words
from ..format.pieces import TensorPiece
from ..format.records import FileRecord, ItemRecord, checksum
from ..storage.errors import DamagedCopy
from ..storage.file_operations import PIECE_BYTES, FileOperations, write_all

__all__ = ["copy_file", "write_layer_file"]

MAX_ARCHIVE_BYTES = 2**30
"""Larger boxes are written as several."""
NONE = np.empty(0, "<u4")
"""Check sums of a box without elements."""


class _CheckedStream:
    """A file that is written from its start to its end, with its size and check sum so far."""

    def __init__(self, files: FileOperations, descriptor: int) -> None:
        self._files, self._descriptor = files, descriptor
        self.bytes = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        """Write a whole buffer."""
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self.crc32 = checksum(piece, self.crc32)
            write_all(self._files, self._descriptor, piece)
        self.bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Nothing is kept back."""


def write_layer_file(
    files: FileOperations, path: Path, pieces: Sequence[tuple[TensorPiece, NDArray[uint8]]]
) -> FileRecord:
    """Write one file, which is on the disk when this returns: the archive of each box, then all check sums.

    Args:
        files: the operations.
        path: the file, in a folder that no reader looks into yet.
        pieces: the boxes, at least one, each with its bytes ``[bytes]``, row by row. All are of one layer.

    Returns:
        What the file holds, and where.
    """
    descriptor = files.create(path)
    try:
        stream = _CheckedStream(files, descriptor)
        records, sums = [], []
        for piece, content in pieces:
            element_bytes, start = piece.data.element_size(), 0
            for box in piece.box.pieces(MAX_ARCHIVE_BYTES // element_bytes):
                data = content[start : start + box.numel * element_bytes]
                start += data.nbytes
                cells = cell_sizes(box.sizes, element_bytes)
                archive_offset = stream.bytes
                data_offset = archive_offset + write_tensor(stream, data, piece.data.dtype, box.sizes)
                record = ItemRecord(
                    key=piece.key,
                    dtype=str(piece.data.dtype).removeprefix("torch."),
                    element_bytes=element_bytes,
                    shape=tuple(piece.shape),
                    offsets=box.offsets,
                    sizes=box.sizes,
                    archive_offset=archive_offset,
                    archive_bytes=stream.bytes - archive_offset,
                    data_offset=data_offset,
                    cells=cells,
                    checks_offset=0,
                )
                checks = check_sums(words(data, box.sizes, element_bytes), cells, element_bytes) if data.size else NONE
                records.append(record)
                sums.append(checks)
        for index, checks in enumerate(sums):
            records[index] = records[index].model_copy(update={"checks_offset": stream.bytes})
            stream.write(np.ascontiguousarray(checks).reshape(-1).view(uint8))
        files.sync(descriptor)
    finally:
        files.close(descriptor)
    return FileRecord(
        name=path.name, layer=pieces[0][0].layer, items=tuple(records), bytes=stream.bytes, crc32=stream.crc32
    )


def copy_file(files: FileOperations, source: Path, target: Path, record: FileRecord) -> None:
    """Copy a file, which is on the disk when this returns.

    Raises:
        DamagedCopy: ``source`` is not the file that ``record`` describes. ``target`` was written nevertheless.
        OSError: reading or writing failed.
    """
    descriptor = files.create(target)
    try:
        stream = _CheckedStream(files, descriptor)
        with open(source, "rb", buffering=0) as original:
            while content := original.read(PIECE_BYTES):
                stream.write(content)
        files.sync(descriptor)
    finally:
        files.close(descriptor)
    if (stream.bytes, stream.crc32) != (record.bytes, record.crc32):
        what = (
            f"has {stream.bytes} bytes instead of {record.bytes}"
            if stream.bytes != record.bytes
            else ("has another check sum than when it was written")
        )
        raise DamagedCopy(f"{os.fspath(source)} {what}")
