"""The index of a checkpoint: which files hold what. Rank 0 makes it from the parts of all ranks."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from ..format.dcp_metadata import dcp_metadata
from ..format.names import METADATA, STATES, part_file
from ..format.records import SCHEMA, CheckpointPart, FileCheck, FileRecord, Manifest, NodePart, checksum
from ..format.run_state import RunState

__all__ = ["Index", "RankPart", "make_index", "rank_part"]


class RankPart(CheckpointPart):
    """What one rank has written in a save, and its states; or why it could not."""

    error: str | None = None
    files: tuple[FileRecord, ...] = ()
    state: Any = None
    """States of the rank, as JSON."""
    binary: dict[str, str] = Field(default_factory=dict)
    """Binary states of the rank, in base 64."""


def rank_part(files: Sequence[FileRecord], state: RunState) -> RankPart:
    """The part of a rank that has written its files."""
    binary = {name: base64.b64encode(content).decode() for name, content in state.binary.items()}
    return RankPart(files=tuple(files), state=dict(state.rank), binary=binary)


class IndexMessage(CheckpointPart):
    """An index as it is sent to the nodes."""

    manifest: Manifest
    contents: dict[str, str]


@dataclass(frozen=True)
class Index:
    """What is written to a folder beside the files of layers."""

    manifest: Manifest
    contents: Mapping[str, bytes]
    """By name of a file, without the manifest."""

    def message(self) -> bytes:
        """As bytes."""
        contents = {name: base64.b64encode(content).decode() for name, content in self.contents.items()}
        return IndexMessage(manifest=self.manifest, contents=contents).model_dump_json(by_alias=True).encode()

    @classmethod
    def from_message(cls, message: bytes) -> Index:
        """The reverse of :meth:`message`."""
        read = IndexMessage.model_validate_json(message)
        return cls(read.manifest, {name: base64.b64decode(content) for name, content in read.contents.items()})


def make_index(
    step: int, identity: str, saved_at: str, nodes: Sequence[str], parts: Sequence[RankPart], state: RunState
) -> Index:
    """Merge the parts of all ranks.

    Args:
        step: that was saved.
        identity: of the checkpoint.
        saved_at: time in UTC.
        nodes: of each rank.
        parts: of each rank.
        state: of rank 0.
    """
    files: dict[str, list[FileRecord]] = defaultdict(list)
    for node, part in zip(nodes, parts, strict=True):
        files[node] += part.files
    contents = {
        part_file(node): NodePart(schema=SCHEMA, node=node, files=tuple(written))
        .model_dump_json(by_alias=True)
        .encode()
        for node, written in files.items()
    }
    contents[METADATA] = dcp_metadata(record for written in files.values() for record in written)
    places, states = [], b""
    for part in parts:
        own = {}
        for name, text in part.binary.items():
            content = base64.b64decode(text)
            own[name] = (len(states), len(content))
            states += content
        places.append(own)
    contents[STATES] = states
    manifest = Manifest(
        schema=SCHEMA,
        id=identity,
        step=step,
        epoch=state.epoch,
        saved_at=saved_at,
        held_by=None,
        plan=state.plan,
        world_size=len(parts),
        layers=tuple(sorted({record.layer for written in files.values() for record in written})),
        param_groups=state.param_groups,
        common=dict(state.common),
        ranks=tuple(part.state for part in parts),
        binary=tuple(places),
        files={name: FileCheck(bytes=len(data), crc32=checksum(data)) for name, data in sorted(contents.items())},
        crc32=0,
    )
    return Index(manifest, contents)
