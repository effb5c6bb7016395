"""A tensor as ``torch.save`` writes it, from memory that is not copied.

``torch.save`` would copy the tensor while it holds Python's lock, which stops the training thread. Here the bytes of
the tensor go from the staging buffer to the file, and other threads run meanwhile.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from typing import Any, Protocol

import torch
from numpy import uint8
from numpy.typing import NDArray

__all__ = ["ByteStream", "write_tensor"]

ALIGNMENT = 64
"""The bytes of a tensor start at a multiple of it within its archive, as ``torch.save`` writes them."""
PADDING = 0x4246
"""Tag of the extra field that torch pads with ("FB")."""


class ByteStream(Protocol):
    """Takes bytes one after another."""

    def write(self, data: Any) -> int:
        """Take all of ``data``, a buffer; returns its length in bytes."""

    def flush(self) -> None:
        """Called by :mod:`zipfile` at the end."""


def write_tensor(stream: ByteStream, data: NDArray[uint8], dtype: torch.dtype, sizes: tuple[int, ...]) -> int:
    """Write an archive that ``torch.load`` reads as a contiguous tensor on the CPU.

    Args:
        stream: where to.
        data: ``[bytes]``: the elements, row by row. Less than 2 GiB: torch cannot read the archives that :mod:`zipfile`
            makes of 2 to 4 GiB.
        dtype: of the tensor.
        sizes: of the tensor.

    Returns:
        Offset of the elements from the start of the archive, in bytes.
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
    """Pad the header of ``record``, which starts at ``position``, so that its content is aligned; returns where that
    starts."""
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
