"""What the JSON files of a checkpoint hold: where each box of each tensor is, with sizes and check sums."""

from __future__ import annotations

import json
import zlib
from typing import Any

from pydantic import ConfigDict, Field

from ..common.files import FilePart, check_file
from .pieces import Box

__all__ = [
    "SCHEMA",
    "CheckpointPart",
    "FileCheck",
    "FileRecord",
    "ItemRecord",
    "Manifest",
    "NodePart",
    "checksum",
    "parse_manifest",
    "parse_part",
]


SCHEMA = 1


def checksum(data: Any, start: int = 0) -> int:
    """CRC-32 of a buffer; ``start`` is that of the bytes before it."""
    return zlib.crc32(data, start)


class CheckpointPart(FilePart):
    """A part of a file. Infinite numbers in the states of a run stay what they are."""

    model_config = ConfigDict(ser_json_inf_nan="constants")


class FileCheck(CheckpointPart):
    """Size and check sum of a file."""

    bytes: int
    crc32: int
    """Of the whole file."""


class ItemRecord(CheckpointPart):
    """A box of a tensor in a file."""

    key: str
    """Name of the tensor."""
    dtype: str
    """Type of its elements, as torch names it, e.g. "float32"."""
    element_bytes: int
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Of the box: index of its first element, by dimension."""
    sizes: tuple[int, ...]
    """Of the box, in elements."""
    archive_offset: int
    """Where its archive, as ``torch.save`` writes it, starts in the file, in bytes."""
    archive_bytes: int
    data_offset: int
    """Where its elements start in the file, in bytes; they are stored row by row."""
    cells: tuple[int, ...]
    """Elements of a cell, by dimension. See :mod:`.cells`."""
    checks_offset: int
    """Where the check sums of its cells start in the file, in bytes."""

    @property
    def box(self) -> Box:
        """The elements, in the whole tensor."""
        return Box(self.offsets, self.sizes)


class FileRecord(FileCheck):
    """A file with one shard of a layer."""

    name: str
    layer: str
    items: tuple[ItemRecord, ...]


class NodePart(CheckpointPart):
    """``part-<node>.json``: the files that a node has written."""

    schema_version: int = Field(alias="schema")
    node: str
    files: tuple[FileRecord, ...]


class Manifest(CheckpointPart):
    """``manifest.json``: what a checkpoint is, and the state of a run that is not in tensors."""

    schema_version: int = Field(alias="schema")
    id: str
    """Differs between all checkpoints that were ever saved; the same in all folders that hold parts of this one."""
    step: int
    epoch: int
    saved_at: str
    """Time in UTC, ISO 8601."""
    held_by: str | None
    """The node on whose local disk the folder is; null for a folder that has the files of all nodes."""
    plan: str
    """Digest of the plan that the run had, or empty."""
    world_size: int
    layers: tuple[str, ...]
    param_groups: Any
    """Settings of the optimizer, e.g. learning rates, as JSON."""
    common: Any
    """States that all ranks share, e.g. scheduler and loader, as JSON."""
    ranks: tuple[Any, ...]
    """States of each rank, as JSON."""
    binary: tuple[dict[str, tuple[int, int]], ...]
    """By rank: where its binary states are in ``states.bin``: name, offset and size in bytes."""
    files: dict[str, FileCheck]
    """All other files of the folder that have no tensors."""
    crc32: int
    """Of this file's other fields."""

    def text(self) -> str:
        """The file, with the right check sum."""
        content = json.loads(self.model_dump_json(by_alias=True))
        return json.dumps({**content, "crc32": _content_checksum(content)}, indent=1, ensure_ascii=False) + "\n"


def parse_part(name: str, text: bytes) -> NodePart:
    """A ``part-<node>.json``."""
    return check_file(name, _content(name, text), text.decode(), NodePart, kind="part of a checkpoint", schema=SCHEMA)


def parse_manifest(name: str, text: bytes) -> Manifest:
    """A ``manifest.json``."""
    content = _content(name, text)
    manifest = check_file(name, content, text.decode(), Manifest, kind="manifest of a checkpoint", schema=SCHEMA)
    if manifest.crc32 != _content_checksum(content):
        raise ValueError(f"{name} was changed or damaged after it was written: its check sum differs")
    return manifest


def _content(name: str, text: bytes) -> Any:
    try:
        return json.loads(text.decode())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None


def _content_checksum(content: dict[str, Any]) -> int:
    rest = {name: value for name, value in content.items() if name != "crc32"}
    return checksum(json.dumps(rest, sort_keys=True).encode())
