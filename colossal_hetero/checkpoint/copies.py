"""Checkpoints that the nodes of a run have, and the newest of them that is whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .found import FoundCheckpoint
from .records import FileRecord, Manifest

__all__ = ["NodeCopy", "SavedIndex", "WholeCheckpoint", "copies_of", "index_of", "newest_whole"]


@dataclass(frozen=True)
class NodeCopy:
    """A folder with a checkpoint, or with the part of it that a node holds."""

    node: str
    """Name of the node; empty for the shared folder."""
    folder: str
    id: str
    step: int
    saved_at: str
    files: frozenset[str]
    """Names of the files in it that have their full sizes."""
    expected: frozenset[str]
    """Names of all files with tensors that the checkpoint has on all nodes."""


@dataclass(frozen=True)
class WholeCheckpoint:
    """A checkpoint all of whose files are on some node or in the shared folder."""

    id: str
    step: int
    copies: tuple[NodeCopy, ...]
    skipped: tuple[str, ...]
    """One clause for each newer checkpoint: what it lacks."""

    def folder(self, node: str) -> str | None:
        """Name of the folder in which a node (empty: the shared folder) has a part of it."""
        return next((copy.folder for copy in self.copies if copy.node == node), None)


@dataclass(frozen=True)
class SavedIndex:
    manifest: Manifest
    files: Mapping[str, FileRecord]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by its key."""
        return {item.key: item.shape for record in self.files.values() for item in record.items}

    @cached_property
    def dtypes(self) -> dict[str, str]:
        return {item.key: item.dtype for record in self.files.values() for item in record.items}

    @property
    def common(self) -> Mapping[str, Any]:
        return self.manifest.common  # type: ignore[no-any-return]


def copies_of(checkpoints: Iterable[FoundCheckpoint], shared: str | None, node: str) -> list[NodeCopy]:
    return [
        NodeCopy(
            node="" if copy.place.name == shared else node,
            folder=copy.folder,
            id=copy.manifest.id,
            step=copy.manifest.step,
            saved_at=copy.manifest.saved_at,
            files=frozenset(name for name in copy.files if copy.fault(name) is None),
            expected=frozenset(found.files),
        )
        for found in checkpoints
        for copy in found.copies
    ]


def index_of(found: FoundCheckpoint) -> SavedIndex:
    return SavedIndex(found.manifest, dict(found.files))


def newest_whole(copies: Iterable[NodeCopy], step: int | None = None) -> WholeCheckpoint | None:
    """The newest checkpoint all of whose files are somewhere; None if there is no checkpoint."""
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
            ordered = sorted(set(group), key=lambda copy: (copy.node, copy.folder))
            return WholeCheckpoint(group[0].id, group[0].step, tuple(ordered), tuple(skipped))
        more = f" and {len(missing) - 1} other files" if len(missing) > 1 else ""
        places = ", ".join(sorted({f"node {copy.node}" if copy.node else "the shared folder" for copy in group}))
        skipped.append(f"that of step {group[0].step} lacks {missing[0]}{more} (parts of it are on {places})")
    if not groups and step is None:
        return None
    there = ", ".join(str(number) for number in sorted({group[0].step for group in groups})) or "none"
    reasons = "; ".join(skipped) or f"there is none of step {step}; the steps are: {there}"
    raise FileNotFoundError(f"no checkpoint is whole: {reasons}")
