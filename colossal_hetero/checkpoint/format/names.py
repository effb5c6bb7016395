"""Names of folders and files of checkpoints."""

from __future__ import annotations

import re
from urllib.parse import quote

__all__ = [
    *("MANIFEST", "METADATA", "REPLACED", "STATES", "TEMPORARY", "is_replaced", "layer_file", "meeting_folder"),
    *("part_file", "removed_folder", "step_folder", "step_of", "unfinished_folder"),
]

MANIFEST = "manifest.json"
"""Written last: a folder without it is no checkpoint."""
METADATA = ".metadata"
"""The index of torch's distributed checkpoints, for torch's own tools."""
STATES = "states.bin"
"""Binary states of ranks, e.g. of random generators."""
REPLACED = ".replaced"
"""Ending of a checkpoint's folder while another checkpoint of the same step takes its place."""
TEMPORARY = (".unfinished-step-", ".removed-step-", ".meeting-")
"""How the names of folders start that are being written, or removed, or hold messages between ranks."""

STEP = re.compile(rf"step-(\d{{8,}})({re.escape(REPLACED)})?")


def step_folder(step: int) -> str:
    """Folder of the checkpoint of a step, e.g. ``step-00000120``."""
    return f"step-{step:08d}"


def unfinished_folder(step: int, run: str, number: int, leader: int | str) -> str:
    """Folder of a checkpoint while it is written: the ``number``-th save of a run. ``leader`` is the rank that will
    finish it."""
    return f".unfinished-{step_folder(step)}.{run}.{number}.{leader}"


def removed_folder(folder: str) -> str:
    """Name of a folder while it is removed."""
    return f".removed-{folder}"


def meeting_folder(run: str) -> str:
    """Folder for messages between the ranks of a run."""
    return f".meeting-{run}"


def step_of(folder: str) -> int | None:
    """The step of a checkpoint's folder; None if it is another folder."""
    found = STEP.fullmatch(folder)
    return int(found[1]) if found else None


def is_replaced(folder: str) -> bool:
    """Whether this is the old one of two checkpoints of the same step."""
    return folder.endswith(REPLACED)


def layer_file(layer: str, shard: str) -> str:
    """File of a layer's shard, e.g. ``block-0007.tp0of2.distcp``."""
    return f"{quote(layer, safe='')}.{quote(shard, safe='')}.distcp"


def part_file(node: str) -> str:
    """File that lists what a node has written, e.g. ``part-gpu-3.json``."""
    return f"part-{quote(node, safe='')}.json"
