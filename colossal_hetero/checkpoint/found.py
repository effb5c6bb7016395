"""Checkpoints in several places, and which of their files each place has. Without torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy import uint8
from numpy.typing import NDArray

from .pieces import MANIFEST, METADATA
from .records import FileCheck, FileRecord, Manifest, NodePart, checksum, parse_manifest, parse_part
from .storage import PIECE_BYTES, DamagedCopy, FileOperations, folder_names, write_all

__all__ = [
    "Copy",
    "FolderPlace",
    "FoundCheckpoint",
    "Place",
    "RepairablePlace",
    "Search",
    "content_of",
    "find_checkpoints",
    "read_whole",
]


# Places --------------------------------------------------------------------------------------------------------------


class Place(Protocol):
    """Folders of checkpoints. A file is named by its folder and its name, e.g. ``step-00000120/manifest.json``."""

    @property
    def name(self) -> str:
        """Name for messages."""

    def folders(self) -> list[str]:
        """Names of the folders of checkpoints; empty if the place cannot be reached."""

    def size(self, file: str) -> int | None:
        """Size of a file in bytes; None if it is not there or cannot be reached."""

    def read(self, file: str, offsets: NDArray[np.int64], length: int) -> NDArray[uint8]:
        """Parts of a file, one after another: ``[len(offsets) * length]``."""


@runtime_checkable
class RepairablePlace(Place, Protocol):
    """A place in which a damaged file can be replaced."""

    def replace(self, file: str, content: Iterable[memoryview]) -> None:
        """Write a file; readers see the old one or the complete new one."""


class FolderPlace:
    def __init__(self, folder: Path | str, files: FileOperations | None = None) -> None:
        self._folder = Path(folder)
        self._files = files or FileOperations()

    @property
    def name(self) -> str:
        return str(self._folder)

    def folders(self) -> list[str]:
        try:
            return folder_names(self._folder)
        except OSError:
            return []

    def size(self, file: str) -> int | None:
        try:
            return os.stat(self._folder / file).st_size
        except OSError:
            return None

    def read(self, file: str, offsets: NDArray[np.int64], length: int) -> NDArray[uint8]:
        content = np.empty(len(offsets) * length, uint8)
        # Not mapped to memory: where a mapped file is cut off or a disk fails, the process would be killed.
        try:
            descriptor = os.open(self._folder / file, os.O_RDONLY)
        except OSError as error:
            raise DamagedCopy(f"{self._folder / file}: {error.strerror}") from None
        try:
            view = content.data
            for index, offset in enumerate(offsets.tolist()):
                self._fill(descriptor, view[index * length : (index + 1) * length], offset, file)
        finally:
            os.close(descriptor)
        return content

    def replace(self, file: str, content: Iterable[memoryview]) -> None:
        path = self._folder / file
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = self._files.create(temporary)
        try:
            for piece in content:
                write_all(self._files, descriptor, piece)
            self._files.sync(descriptor)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            self._files.close(descriptor)
        self._files.rename(temporary, path)

    def _fill(self, descriptor: int, target: memoryview, offset: int, file: str) -> None:
        position = 0
        while position < target.nbytes:
            try:
                count = os.preadv(descriptor, [target[position:]], offset + position)
            except OSError as error:
                raise DamagedCopy(f"{self._folder / file} cannot be read: {error.strerror}") from None
            if count == 0:
                raise DamagedCopy(f"{self._folder / file} ends at byte {offset + position:,}: it was cut off")
            position += count


@dataclass(frozen=True)
class Copy:
    """A checkpoint as one place has it: all of it, or the files of one node."""

    place: Place
    folder: str
    manifest: Manifest
    parts: Mapping[str, NodePart]

    @cached_property
    def files(self) -> Mapping[str, FileRecord]:
        parts = self.parts.values() if self.manifest.held_by is None else [self.parts[self.manifest.held_by]]
        return {record.name: record for part in parts for record in part.files}

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def check(self, name: str) -> FileCheck:
        return self.files[name] if name in self.files else self.manifest.files[name]

    def fault(self, name: str) -> str | None:
        """Damage that a file's name and size show, or None."""
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
        """Manifest of the nearest place; all are the same but for ``held_by``."""
        return self.copies[0].manifest

    @property
    def step(self) -> int:
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
    checkpoints: tuple[FoundCheckpoint, ...]
    torn: Mapping[str, str] = field(default_factory=dict)
    """Reasons why folders are no checkpoints, by name of the place and the folder."""


def find_checkpoints(places: Sequence[Place]) -> Search:
    """All checkpoints of which a place has a part. Only small files are read."""
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
    actual = place.size(file)
    if actual is None:
        raise DamagedCopy(f"{place.name}/{file} is missing")
    if size is not None and actual != size:
        raise DamagedCopy(f"{place.name}/{file} has {actual:,} bytes instead of {size:,}")
    return place.read(file, np.zeros(1, np.int64), actual).tobytes()


def content_of(copy: Copy, name: str) -> Iterator[memoryview]:
    """A whole file, piece by piece, checked before its last piece."""
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
