"""Which of the states in memory files counts: a pure function of what all ranks have found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...checkpoint.format.box import Box, cover, whole

__all__ = ["FoundState", "KeptBox", "StateName", "newest_whole_state"]


class StateName(NamedTuple):
    """The state of the whole model after a step, as one world has made it."""

    version: int
    """Optimizer steps that are done."""
    world: str
    """Of the processes that wrote it; later worlds come later in the alphabet."""


class KeptBox(NamedTuple):
    """A box of a tensor in a file."""

    key: str
    """See :class:`~.pieces.TensorPiece`."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box


@dataclass(frozen=True)
class FoundState:
    """What is in a file: the part of a state that one rank held."""

    name: StateName
    tensors: tuple[str, ...]
    """Names of all parameters and buffers of the model, also those that are not in this file."""
    boxes: tuple[KeptBox, ...]


def newest_whole_state(found: Iterable[FoundState]) -> StateName | None:
    """The newest state of which all elements are in some file.

    Files of different worlds are never mixed: a step that was done again, with another plan, is equal up to the order
    of sums only.

    Args:
        found: by all ranks.

    Returns:
        None if no state is whole.
    """
    by_name: dict[StateName, list[FoundState]] = {}
    for each in found:
        by_name.setdefault(each.name, []).append(each)
    return next((name for name in sorted(by_name, reverse=True) if _is_whole(by_name[name])), None)


def _is_whole(parts: Sequence[FoundState]) -> bool:
    boxes: dict[tuple[str, tuple[int, ...]], set[Box]] = {}
    for part in parts:
        for key, shape, box in part.boxes:
            boxes.setdefault((key, shape), set()).add(box)
    keys = {key for key, _ in boxes}
    if any(f"param.{name}" not in keys and f"buffer.{name}" not in keys for name in parts[0].tensors):
        return False
    return not any(cover(whole(shape), sorted(held))[1] for (_, shape), held in boxes.items())
