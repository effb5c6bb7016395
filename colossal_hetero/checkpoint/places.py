"""Where checkpoints are: folders, the copies of a checkpoint in them, and the newest that is whole. Without torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .config import CheckpointError
from .pieces import MANIFEST, STATES, TEMPORARY
from .records import FileCheck, FileRecord, ItemRecord, Manifest, checksum, parse_manifest, parse_part
from .storage import PIECE_BYTES, DamagedCopy, FileOperations, folder_names, write_file


class Place:
    """A folder of checkpoints. A file is named by its folder and its name, e.g. ``step-00000120/manifest.json``."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)

    @property
    def name(self) -> str:
        return str(self._folder)

    def folders(self) -> list[str]:
        """Names of the folders of checkpoints; empty if the place cannot be reached."""
        try:
            return folder_names(self._folder)
        except OSError:
            return []

    def size(self, file: str) -> int | None:
        """Size of a file in bytes; None if it is not there or cannot be reached."""
        try:
            return os.stat(self._folder / file).st_size
        except OSError:
            return None

    def read(self, file: str, start: int, length: int) -> bytearray:
        content, position = bytearray(length), 0
        view = memoryview(content)
        # Not mapped to memory: where a mapped file is cut off or a disk fails, the process would be killed.
        try:
            with open(self._folder / file, "rb", buffering=0) as opened:
                opened.seek(start)
                while position < length and (count := opened.readinto(view[position:])):
                    position += count
        except OSError as error:
            raise DamagedCopy(f"{self._folder / file} cannot be read: {error.strerror}") from None
        if position < length:
            raise DamagedCopy(f"{self._folder / file} ends at byte {start + position:,}: it was cut off")
        return content

    def replace(self, file: str, content: Iterable[memoryview]) -> None:
        """Write a file; readers see the old one or the complete new one."""
        write_file(FileOperations(), self._folder / file, content)


@dataclass(frozen=True)
class Copy:
    """A checkpoint as one place has it: all of it, or the files of one node."""

    place: Place
    folder: str
    manifest: Manifest
    files: Mapping[str, FileRecord]
    all_files: Mapping[str, FileRecord]  # those of all nodes

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def full_name(self, name: str) -> str:
        return f"{self.place.name}/{self.folder}/{name}"

    def check(self, name: str) -> FileCheck:
        return self.files[name] if name in self.files else self.manifest.files[name]

    def fault(self, name: str) -> str | None:
        """Damage that a file's name and size show, or None."""
        size, expected = self.place.size(self.path(name)), self.check(name).bytes
        if size is None:
            return f"{self.full_name(name)} is missing"
        if size != expected:
            return f"{self.full_name(name)} has {size:,} bytes instead of {expected:,}"
        return None

    def content(self, name: str) -> Iterator[memoryview]:
        """A whole file, piece by piece, checked before its last piece."""
        record, crc32 = self.check(name), 0
        fault = self.fault(name)
        if fault is not None:
            raise DamagedCopy(fault)
        for start in range(0, record.bytes, PIECE_BYTES):
            length = min(PIECE_BYTES, record.bytes - start)
            piece = memoryview(self.place.read(self.path(name), start, length))
            crc32 = checksum(piece, crc32)
            if start + length == record.bytes and crc32 != record.crc32:
                raise DamagedCopy(f"{self.full_name(name)} is damaged: its check sum differs")
            yield piece

    def item(self, name: str, item: ItemRecord) -> bytearray:
        """The elements of a box, checked."""
        content = self.place.read(self.path(name), item.start, item.bytes)
        if checksum(content) != item.crc32:
            raise DamagedCopy(
                f"{self.full_name(name)} is damaged: the check sum of elements {item.offsets} to +{item.sizes} of "
                f"{item.key} differs"
            )
        return content


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with its copies, the nearest first; only its index, if this rank reaches none."""

    manifest: Manifest
    files: Mapping[str, FileRecord]
    copies: tuple[Copy, ...] = ()

    @property
    def step(self) -> int:
        return self.manifest.step

    @cached_property
    def items(self) -> Mapping[str, list[tuple[FileRecord, ItemRecord]]]:
        """The boxes of each tensor, by its key."""
        found: dict[str, list[tuple[FileRecord, ItemRecord]]] = {}
        for file in self.files.values():
            for item in file.items:
                found.setdefault(item.key, []).append((file, item))
        return found

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: boxes[0][1].shape for key, boxes in self.items.items()}

    @cached_property
    def dtypes(self) -> dict[str, str]:
        return {key: boxes[0][1].dtype for key, boxes in self.items.items()}

    def copies_of(self, name: str) -> list[Copy]:
        return [copy for copy in self.copies if name == STATES or name in copy.files]

    def faults(self) -> list[str]:
        """Files that no place has whole, as far as names and sizes tell; empty if the checkpoint is complete."""
        faults = []
        for name in (*self.files, STATES):
            found = [copy.fault(name) for copy in self.copies_of(name)]
            if None not in found:
                faults.append("; ".join(filter(None, found)) or f"{name} is on other nodes only")
        return faults


@dataclass(frozen=True)
class Search:
    places: tuple[Place, ...]
    checkpoints: tuple[Checkpoint, ...]
    """All checkpoints of which a place has a part; the last saved first, whatever their steps."""
    torn: Mapping[str, str]  # reasons why folders are no checkpoints, by name of the place and the folder

    def newest(self) -> Checkpoint:
        """The newest checkpoint of which these places together have all files."""
        for checkpoint in self.checkpoints:
            if not checkpoint.faults():
                return checkpoint
        names = ", ".join(place.name for place in self.places)
        found = [f"step {each.step}: {each.faults()[0]}" for each in self.checkpoints]
        reasons = "; ".join([*self.torn.values(), *found]) or "there is no folder of a checkpoint"
        raise CheckpointError(f"no complete checkpoint in {names}: {reasons}")

    def of_step(self, step: int) -> Checkpoint:
        for checkpoint in self.checkpoints:
            if checkpoint.step == step:
                return checkpoint
        there = ", ".join(str(each.step) for each in self.checkpoints) or "none"
        reasons = "".join(f"; {reason}" for reason in self.torn.values())
        raise CheckpointError(f"no checkpoint of step {step}; there are: {there}{reasons}")


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
    found = [Checkpoint(each[0].manifest, each[0].all_files, tuple(each)) for each in copies.values()]
    found.sort(key=lambda each: (each.manifest.saved_at, each.step), reverse=True)
    return Search(tuple(places), tuple(found), torn)


def _read_copy(place: Place, folder: str) -> Copy:
    name = f"{place.name}/{folder}"
    size = place.size(f"{folder}/{MANIFEST}")
    if size is None:
        raise DamagedCopy(f"{name} is not complete: it has no {MANIFEST}")
    manifest = parse_manifest(f"{name}/{MANIFEST}", place.read(f"{folder}/{MANIFEST}", 0, size))
    index = Copy(place, folder, manifest, {}, {})
    own: dict[str, FileRecord] = {}
    everything: dict[str, FileRecord] = {}
    for file in manifest.files:
        if file.startswith("part-"):
            part = parse_part(f"{name}/{file}", b"".join(index.content(file)))
            files = {record.name: record for record in part.files}
            everything |= files
            own |= files if manifest.held_by in (None, part.node) else {}
    return Copy(place, folder, manifest, own, everything)


@dataclass(frozen=True)
class NodeCopy:
    """A copy as the ranks of other nodes know it."""

    node: str  # name of the node; empty for the shared folder
    id: str
    step: int
    saved_at: str
    files: frozenset[str]
    """Names of the files in it that have their full sizes: those with tensors, and that of the other states."""
    expected: frozenset[str]  # names of all such files that the checkpoint has on all nodes

    @classmethod
    def of(cls, copy: Copy, node: str) -> NodeCopy:
        files = frozenset(name for name in (*copy.files, STATES) if copy.fault(name) is None)
        manifest = copy.manifest
        return cls(node, manifest.id, manifest.step, manifest.saved_at, files, frozenset((*copy.all_files, STATES)))


def newest_whole(copies: Iterable[NodeCopy], step: int | None = None) -> tuple[list[NodeCopy], list[str]]:
    """Copies of the newest checkpoint all of whose files are somewhere, and what newer ones lack.

    No copies, if there is no checkpoint.
    """
    by_id: dict[str, list[NodeCopy]] = {}
    for copy in copies:
        by_id.setdefault(copy.id, []).append(copy)
    groups = sorted(by_id.values(), key=lambda group: (group[0].saved_at, group[0].step), reverse=True)
    skipped: list[str] = []
    for group in groups:
        if step is not None and group[0].step != step:
            continue
        missing = sorted(group[0].expected - frozenset().union(*(copy.files for copy in group)))
        if not missing:
            return sorted(set(group), key=lambda copy: copy.node), skipped
        more = f" and {len(missing) - 1} other files" if len(missing) > 1 else ""
        places = ", ".join(sorted({f"node {copy.node}" if copy.node else "the shared folder" for copy in group}))
        skipped.append(f"that of step {group[0].step} lacks {missing[0]}{more} (parts of it are on {places})")
    if not groups and step is None:
        return [], []
    there = ", ".join(str(number) for number in sorted({group[0].step for group in groups})) or "none"
    reasons = "; ".join(skipped) or f"there is none of step {step}; the steps are: {there}"
    raise FileNotFoundError(f"no checkpoint is whole: {reasons}")


@dataclass(frozen=True)
class Entry:
    name: str
    copy: Copy | None
    faults: tuple[str, ...]
    bytes: int


def entries(root: Path, step: int | None = None) -> list[Entry]:
    """The checkpoints in a folder, the newest first, then what is not complete."""
    if not root.is_dir():
        raise CheckpointError(f"there is no folder {root}")
    search = find_checkpoints([Place(root)])
    found = []
    for copy in (copy for checkpoint in search.checkpoints for copy in checkpoint.copies):
        faults = tuple(filter(None, map(copy.fault, (*copy.files, STATES))))
        found.append(Entry(copy.folder, copy, faults, _bytes(root / copy.folder)))
    others = [(Path(each).name, reason) for each, reason in search.torn.items()]
    unfinished = "left by a save that was interrupted, or is being written; the next save removes it"
    others += [(each.name, unfinished) for each in sorted(root.iterdir()) if each.name.startswith(TEMPORARY)]
    found += [Entry(name, None, (reason,), _bytes(root / name)) for name, reason in others]
    if step is not None:
        found = [entry for entry in found if entry.copy is not None and entry.copy.manifest.step == step]
    if not found:
        raise CheckpointError(f"{root} has no checkpoint" + ("" if step is None else f" of step {step}"))
    return found


def damaged_files(entry: Entry) -> Iterator[str]:
    """Read every byte of a checkpoint; yields what is wrong with each damaged file."""
    if entry.copy is None:
        yield from entry.faults
        return
    for name in (*entry.copy.files, *entry.copy.manifest.files):
        try:
            for _ in entry.copy.content(name):
                pass
        except DamagedCopy as error:
            yield str(error)


def _bytes(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
