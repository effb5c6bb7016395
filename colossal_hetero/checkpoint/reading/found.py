"""Which checkpoints there are in several places, and which of their files each place has. Without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..format.names import MANIFEST, METADATA
from ..format.records import FileCheck, FileRecord, Manifest, NodePart, checksum, parse_manifest, parse_part
from ..storage.errors import DamagedCopy
from ..storage.file_operations import PIECE_BYTES
from .places import Place

__all__ = ["Copy", "FoundCheckpoint", "Search", "content_of", "find_checkpoints", "read_whole"]


@dataclass(frozen=True)
class Copy:
    """A checkpoint as one place has it: all of it, or the files of one node."""

    place: Place
    folder: str
    manifest: Manifest
    parts: Mapping[str, NodePart]
    """By node."""

    @cached_property
    def files(self) -> Mapping[str, FileRecord]:
        """The files of layers that were written here, by name."""
        parts = self.parts.values() if self.manifest.held_by is None else [self.parts[self.manifest.held_by]]
        return {record.name: record for part in parts for record in part.files}

    def path(self, name: str) -> str:
        """A file, as the place names it."""
        return f"{self.folder}/{name}"

    def check(self, name: str) -> FileCheck:
        """Size and check sum of a file of a layer, or of another file that the manifest names."""
        return self.files[name] if name in self.files else self.manifest.files[name]

    def fault(self, name: str) -> str | None:
        """What can be seen from a file's name and size: why it is damaged, or None."""
        size, expected = self.place.size(self.path(name)), self.check(name).bytes
        if size is None:
            return f"{self.place.name}/{self.path(name)} is missing"
        if size != expected:
            return f"{self.place.name}/{self.path(name)} has {size:,} bytes instead of {expected:,}"
        return None


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint with all its copies, the nearest first."""

    copies: tuple[Copy, ...]

    @property
    def manifest(self) -> Manifest:
        """As the nearest place has it; all are the same but for ``held_by``."""
        return self.copies[0].manifest

    @property
    def step(self) -> int:
        """That was saved."""
        return self.manifest.step

    @cached_property
    def files(self) -> Mapping[str, FileRecord]:
        """All files of layers, by name, whether or not a place has them."""
        return {
            record.name: record
            for copy in self.copies
            for part in copy.parts.values()
            for record in part.files
        }  # fmt: skip

    def copies_of(self, name: str) -> list[Copy]:
        """Those that should have a file."""
        return [copy for copy in self.copies if name in copy.files]

    def faults(self) -> list[str]:
        """Files that no place has whole, as far as names and sizes tell; empty if the checkpoint is complete."""
        faults = []
        for name in self.files:
            copies = self.copies_of(name)
            found = [copy.fault(name) for copy in copies]
            if None not in found:
                faults.append("; ".join(fault for fault in found if fault) or f"{name} is on other nodes only")
        return faults


@dataclass(frozen=True)
class Search:
    """What was found."""

    checkpoints: tuple[FoundCheckpoint, ...]
    """The newest first."""
    torn: Mapping[str, str] = field(default_factory=dict)
    """Folders that are no checkpoints, each behind the name of its place, and why."""


def find_checkpoints(places: Sequence[Place]) -> Search:
    """All checkpoints of which a place has a part. Only small files are read.

    Args:
        places: where to look, the nearest first.
    """
    copies: dict[str, list[Copy]] = {}
    torn = {}
    for place in places:
        for folder in place.folders():
            try:
                copy = _read_copy(place, folder)
            except (DamagedCopy, ValueError) as error:
                torn[f"{place.name}/{folder}"] = str(error)
            else:
                copies.setdefault(copy.manifest.id, []).append(copy)
    found = [FoundCheckpoint(tuple(each)) for each in copies.values()]
    found.sort(key=lambda each: (each.manifest.saved_at, each.step), reverse=True)
    return Search(tuple(found), torn)


def read_whole(place: Place, file: str, size: int | None = None) -> bytes:
    """A small file.

    Raises:
        DamagedCopy: it is missing, cannot be read, or has another size than ``size``.
    """
    actual = place.size(file)
    if actual is None:
        raise DamagedCopy(f"{place.name}/{file} is missing")
    if size is not None and actual != size:
        raise DamagedCopy(f"{place.name}/{file} has {actual:,} bytes instead of {size:,}")
    return place.read(file, np.zeros(1, np.int64), actual).tobytes()


def content_of(copy: Copy, name: str) -> Iterator[memoryview]:
    """A whole file, piece by piece, checked before its last piece.

    Raises:
        DamagedCopy: it is missing, has another size, cannot be read, or its check sum differs.
    """
    record, crc32 = copy.check(name), 0
    fault = copy.fault(name)
    if fault is not None:
        raise DamagedCopy(fault)
    for start in range(0, record.bytes, PIECE_BYTES):
        length = min(PIECE_BYTES, record.bytes - start)
        piece = copy.place.read(copy.path(name), np.array([start]), length).data
        crc32 = checksum(piece, crc32)
        if start + length == record.bytes and crc32 != record.crc32:
            raise DamagedCopy(f"{copy.place.name}/{copy.path(name)} is damaged: its check sum differs")
        yield piece


def _read_copy(place: Place, folder: str) -> Copy:
    if place.size(f"{folder}/{METADATA}") is None:
        raise DamagedCopy(f"{place.name}/{folder} is not complete: it has no {METADATA}")
    if place.size(f"{folder}/{MANIFEST}") is None:
        raise DamagedCopy(f"{place.name}/{folder} is not complete: it has no {MANIFEST}")
    manifest = parse_manifest(f"{place.name}/{folder}/{MANIFEST}", read_whole(place, f"{folder}/{MANIFEST}"))
    parts = {}
    for name, check in manifest.files.items():
        if name.startswith("part-"):
            text = read_whole(place, f"{folder}/{name}", check.bytes)
            if checksum(text) != check.crc32:
                raise DamagedCopy(f"{place.name}/{folder}/{name} is damaged: its check sum differs")
            part = parse_part(f"{place.name}/{folder}/{name}", text)
            parts[part.node] = part
    return Copy(place, folder, manifest, parts)
