"""Send boxes of tensors between ranks, one layer after the other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..accelerator import get_accelerator
from .format.box import Box
from .format.pieces import TensorPiece
from .placement.transfers import Transfer

__all__ = ["exchange", "piece_with"]


def exchange(
    transfers: Sequence[Transfer],
    outgoing: Mapping[Transfer, Tensor],
    needed: Mapping[str, Sequence[TensorPiece]],
) -> int:
    """Send and receive boxes. Every rank calls it with the same transfers.

    In each layer, a rank has at most one message from each other rank. So it needs memory for one layer more.

    Args:
        transfers: what to send, sorted by layer.
        outgoing: the tensors ``[box.sizes]`` that this rank sends.
        needed: pieces to load into, by key. Received boxes are parts of them.

    Returns:
        the number of bytes that this rank received.
    """
    rank, received = dist.get_rank(), 0
    device = _device()
    for _, group in itertools.groupby(transfers, key=lambda transfer: transfer.layer):
        of_layer = list(group)
        incoming: list[tuple[list[tuple[Transfer, TensorPiece]], Tensor]] = []
        works: list[dist.Work] = []
        messages: list[Tensor] = []
        for sender, parts in _by(of_layer, "sender", "receiver", rank):
            targets = [(each, piece_with(needed[each.key], each.box)) for each in parts]
            size = sum(each.box.numel * piece.data.element_size() for each, piece in targets)
            message = torch.empty(size, dtype=torch.uint8, device=device)
            works.append(_started(dist.irecv(message, sender)))
            incoming.append((targets, message))
            received += size
        for receiver, parts in _by(of_layer, "receiver", "sender", rank):
            flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (outgoing[each] for each in parts)]
            messages.append(torch.cat(flat).to(device))
            works.append(_started(dist.isend(messages[-1], receiver)))
        for work in works:
            work.wait()
        for targets, message in incoming:
            start = 0
            for each, piece in targets:
                size = each.box.numel * piece.data.element_size()
                values = message[start : start + size].clone().view(piece.data.dtype).view(each.box.sizes)
                piece.data[piece.box.slices_of(each.box)] = values.to(piece.data.device)  # [()] without dimensions
                start += size
    return received


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # it is None on ranks outside of the group, and the group has all ranks
    return work


def _by(transfers: Sequence[Transfer], other: str, own: str, rank: int) -> list[tuple[int, list[Transfer]]]:
    """The transfers in which this rank has the role ``own``, by the rank with the role ``other``, ascending."""
    mine = sorted(
        (each for each in transfers if getattr(each, own) == rank), key=lambda each: (getattr(each, other), each)
    )
    return [(number, list(parts)) for number, parts in itertools.groupby(mine, key=lambda each: getattr(each, other))]


def piece_with(pieces: Sequence[TensorPiece], box: Box) -> TensorPiece:
    """The piece that has a box, all of it. All are of the same tensor."""
    return next(piece for piece in pieces if piece.box.intersection(box) == box)


def _device() -> torch.device:
    """Where the tensors of messages must be: on the host, if a backend can send them from there."""
    if "cpu:" in str(dist.get_backend_config()):
        return torch.device("cpu")
    return get_accelerator().get_current_device()
