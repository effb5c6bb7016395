"""Where a rank has the boxes that it reads, sends and receives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from .format.box import Box
from .format.pieces import TensorPiece
from .placement.transfers import Read

__all__ = ["BoxMemory"]


class BoxMemory:
    """The memory of boxes: parts of the rank's pieces, or memory of their own for those that it only sends.

    Args:
        pieces: of this rank, of the types that were saved. Boxes of the same tensor do not overlap.
        shapes: of all tensors of the checkpoint, by key.
        dtypes: names of their types.
    """

    def __init__(
        self, pieces: Iterable[TensorPiece], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
    ) -> None:
        self._pieces: dict[str, list[TensorPiece]] = defaultdict(list)
        for piece in pieces:
            assert not any(piece.box.intersection(other.box) for other in self._pieces[piece.key]), piece.key
            self._pieces[piece.key].append(piece)
        self._shapes, self._dtypes = shapes, dtypes
        self._to_send: dict[tuple[str, Box], Tensor] = {}

    def holds(self, key: str, box: Box) -> bool:
        """Whether a box is part of a piece."""
        return self._piece(key, box) is not None

    def to_read(self, read: Read) -> TensorPiece:
        """The memory to read a box into; made now, if it is not part of a piece."""
        piece = self._piece(read.key, read.box)
        if piece is not None:
            return replace(piece, box=read.box, data=_part(piece, read.box))
        data = torch.empty(read.box.sizes, dtype=getattr(torch, self._dtypes[read.key]))
        self._to_send[read.key, read.box] = data
        return TensorPiece(read.layer, read.key, self._shapes[read.key], read.box, data, "")

    def tensor(self, key: str, box: Box) -> Tensor:
        """The elements of a box that was read or is received: ``[box.sizes]``."""
        piece = self._piece(key, box)
        return self._to_send[key, box] if piece is None else _part(piece, box)

    def free(self, key: str, box: Box) -> None:
        """Give back the memory of a box that has been sent, unless it is part of a piece."""
        self._to_send.pop((key, box), None)

    def _piece(self, key: str, box: Box) -> TensorPiece | None:
        return next((piece for piece in self._pieces.get(key, ()) if piece.box.intersection(box) == box), None)


def _part(piece: TensorPiece, box: Box) -> Tensor:
    return piece.data[piece.box.slices_of(box)] if box.sizes else piece.data
