"""Content of the JSON files of a checkpoint: where each box of each tensor is, with sizes and check sums."""

import json
import zlib
from typing import Any

from pydantic import ConfigDict, Field

from ..common.files import FilePart, check_file
from .pieces import Box

SCHEMA = 1


def checksum(data: Any, start: int = 0) -> int:
    """CRC-32 of a buffer; ``start`` is that of the bytes before it."""
    return zlib.crc32(data, start)


class CheckpointPart(FilePart):
    """A part of a file. Infinite numbers in the states of a run stay what they are; bytes are in base 64."""

    model_config = ConfigDict(ser_json_inf_nan="constants", ser_json_bytes="base64", val_json_bytes="base64")


class FileCheck(CheckpointPart):
    """Size and CRC-32 of a file, or of a part of it."""

    bytes: int
    crc32: int


class ItemRecord(FileCheck):
    """A box of a tensor in a file. ``shape`` is that of the tensor, ``offsets`` and ``sizes`` are those of the box."""

    key: str
    dtype: str
    """Type of its elements, as torch names it, e.g. "float32"."""
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Start of its elements in the file, in bytes; they are stored row by row."""

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


class FileRecord(FileCheck):
    name: str
    layer: str
    items: tuple[ItemRecord, ...]


class NodePart(CheckpointPart):
    """``part-<node>.json``: the files that a node has written."""

    schema_version: int = Field(alias="schema")
    node: str
    files: tuple[FileRecord, ...]


class Manifest(CheckpointPart):
    """``manifest.json``: what a checkpoint is, and the state of a run (:class:`.RunState`) that is not in tensors."""

    schema_version: int = Field(alias="schema")
    id: str
    """Name that no other checkpoint has; the same in all folders that hold parts of this one."""
    step: int
    epoch: int
    saved_at: str
    """Time in UTC, ISO 8601."""
    held_by: str | None
    """The node on whose local disk the folder is; null for a folder that has the files of all nodes."""
    plan: str
    world_size: int
    param_groups: Any
    common: Any
    ranks: tuple[Any, ...]
    binary: tuple[dict[str, tuple[int, int]], ...]
    """Places of the binary states in ``states.bin``, by rank: name, offset and size in bytes."""
    files: dict[str, FileCheck]
    """All other files of the folder that have no tensors."""
    crc32: int
    """CRC-32 of this file's other fields."""

    def text(self) -> str:
        content = json.loads(self.model_dump_json(by_alias=True))
        return json.dumps({**content, "crc32": _content_checksum(content)}, indent=1, ensure_ascii=False) + "\n"


def parse_part(name: str, text: bytes | bytearray) -> NodePart:
    return check_file(name, _content(name, text), text.decode(), NodePart, kind="part of a checkpoint", schema=SCHEMA)


def parse_manifest(name: str, text: bytes | bytearray) -> Manifest:
    content = _content(name, text)
    manifest = check_file(name, content, text.decode(), Manifest, kind="manifest of a checkpoint", schema=SCHEMA)
    if manifest.crc32 != _content_checksum(content):
        raise ValueError(f"{name} was changed or damaged after it was written: its check sum differs")
    return manifest


def _content(name: str, text: bytes | bytearray) -> Any:
    try:
        return json.loads(text.decode())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None


def _content_checksum(content: dict[str, Any]) -> int:
    rest = {name: value for name, value in content.items() if name != "crc32"}
    return checksum(json.dumps(rest, sort_keys=True).encode())
