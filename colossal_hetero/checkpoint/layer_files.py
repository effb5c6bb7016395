"""Writing of the file of one shard of a layer, and its copy to another folder."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy import uint8
from numpy.typing import NDArray

from .cells import cell_sizes, check_sums, words
from .pieces import TensorPiece
from .records import FileRecord, ItemRecord, checksum
from .storage import PIECE_BYTES, DamagedCopy, FileOperations, write_all

__all__ = ["ByteStream", "copy_file", "write_layer_file", "write_tensor"]


# Archive -------------------------------------------------------------------------------------------------------------
# ``torch.save`` would copy the tensor while it holds Python's lock, which stops the training thread. Here its bytes go
# from the staging buffer to the file, and other threads run meanwhile.


ALIGNMENT = 64
"""Multiple at which the bytes of a tensor start within its archive, as ``torch.save`` writes them."""
PADDING = 0x4246
"""Tag of the extra field that torch pads with ("FB")."""


class ByteStream(Protocol):
    def write(self, data: Any) -> int:
        """Take all of ``data``, a buffer; returns its length in bytes."""

    def flush(self) -> None:
        """Called by :mod:`zipfile` at the end."""


def write_tensor(stream: ByteStream, data: NDArray[uint8], dtype: torch.dtype, sizes: tuple[int, ...]) -> int:
    """Write an archive that ``torch.load`` reads as a contiguous CPU tensor; returns the byte offset of its elements.

    ``data`` are the elements, ``[bytes]``, row by row, less than 2 GiB: torch cannot read the archives that
    :mod:`zipfile` makes of 2 to 4 GiB.
    """
    records: list[tuple[str, Any]] = [
        ("data.pkl", _pickled(dtype, sizes)),
        ("byteorder", b"little"),
        ("data/0", data),
        ("version", b"3\n"),
    ]
    offset = 0
    # The stream cannot seek, so sizes and check sums follow each record, and are repeated in the archive's index.
    with zipfile.ZipFile(stream, "w") as archive:  # type: ignore[call-overload]
        for name, content in records:
            record = zipfile.ZipInfo(f"archive/{name}")
            record.file_size = memoryview(content).nbytes
            if name == "data/0":
                offset = _align(record, archive.fp.tell())  # type: ignore[union-attr]
            archive.writestr(record, content)
    return offset


def _align(record: zipfile.ZipInfo, position: int) -> int:
    """Pad the header of ``record``, at ``position``, so that its content is aligned; returns the content's start."""
    record.CRC = 0  # filled in later; the length of the header does not depend on it
    end = position + len(record.FileHeader(zip64=False)) + 4
    record.extra = struct.pack("<HH", PADDING, -end % ALIGNMENT) + b"Z" * (-end % ALIGNMENT)
    return end + -end % ALIGNMENT


class _TensorPickler(pickle.Pickler):
    """Pickles a tensor without its elements, which are the record ``data/0`` of the archive."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            return ("storage", getattr(torch, obj._pickle_storage_type()), "0", "cpu", obj._size())
        if isinstance(obj, torch.storage.UntypedStorage):
            return ("storage", torch.storage.UntypedStorage, "0", "cpu", obj.nbytes())
        return None


def _pickled(dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    # The memory of this tensor is reserved but not touched.
    _TensorPickler(stream, protocol=2).dump(torch.empty(sizes, dtype=dtype))
    return stream.getvalue()


MAX_ARCHIVE_BYTES = 2**30
"""Bytes above which a box is written as several."""
NONE = np.empty(0, "<u4")


class _CheckedStream:
    def __init__(self, files: FileOperations, descriptor: int) -> None:
        self._files, self._descriptor = files, descriptor
        self.bytes = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
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

    ``pieces`` are boxes of one layer, at least one, each with its bytes ``[bytes]``, row by row. No reader looks into
    the folder of ``path`` yet.
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
    """Copy a file, which is on the disk when this returns."""
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
