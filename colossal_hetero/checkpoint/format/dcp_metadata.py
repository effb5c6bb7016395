"""``.metadata``: the index with which torch's own tools read a checkpoint (``torch.distributed.checkpoint``)."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .records import FileRecord

__all__ = ["dcp_metadata"]


def dcp_metadata(files: Iterable[FileRecord]) -> bytes:
    """The content of ``.metadata`` for these files. A box that several files hold is read from the first."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for file in files:
        for item in file.items:
            if item.key not in tensors:
                properties = TensorProperties(dtype=getattr(torch, item.dtype))
                tensors[item.key] = TensorStorageMetadata(properties, torch.Size(item.shape), [])
            index = MetadataIndex(item.key, item.offsets)
            if index not in places:
                places[index] = _StorageInfo(file.name, item.archive_offset, item.archive_bytes)
                tensors[item.key].chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))
    return pickle.dumps(Metadata({**tensors}, planner_data={key: (key,) for key in tensors}, storage_data=places))
