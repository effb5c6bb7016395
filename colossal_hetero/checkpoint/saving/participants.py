"""What all ranks know of each other before they save."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..format.pieces import TensorPiece
from .file_division import Holding

__all__ = ["Participants", "gather_participants", "holdings_of"]


@dataclass(frozen=True)
class Participants:
    """Equal on all ranks, except for :attr:`rank`."""

    rank: int
    nodes: tuple[str, ...]
    """Of each rank."""
    holdings: tuple[Holding, ...]
    """Of all ranks."""
    run: str
    """Differs between all runs that save into the same folders."""

    @property
    def node(self) -> str:
        """Of this rank."""
        return self.nodes[self.rank]

    @property
    def leaders(self) -> dict[str, int]:
        """By node: its first rank, which finishes the node's local folder."""
        return {node: self.nodes.index(node) for node in sorted(set(self.nodes))}


def holdings_of(rank: int, node: str, pieces: Iterable[TensorPiece]) -> tuple[Holding, ...]:
    """What a rank holds."""
    return tuple(
        Holding(rank, node, each.layer, each.shard, each.key, each.box, each.data.numel() * each.data.element_size())
        for each in pieces
    )


def gather_participants(pieces: Sequence[TensorPiece], node: str | None = None, group: Any = None) -> Participants:
    """Exchange what each rank holds. All ranks call it, before the first save and when what a rank holds has changed.

    Args:
        pieces: that this rank holds.
        node: name of this rank's node, the same on all its ranks; default: the name of the host.
        group: the ranks; default: all.
    """
    node = node or socket.gethostname()
    run = secrets.token_hex(4)
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return Participants(0, (node,), holdings_of(0, node, pieces), run)
    rank = dist.get_rank(group)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (node, holdings_of(rank, node, pieces), run), group=group)
    return Participants(
        rank,
        tuple(node for node, _, _ in everyone),
        tuple(holding for _, holdings, _ in everyone for holding in holdings),
        everyone[0][2],
    )
