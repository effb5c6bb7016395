"""Read boxes of tensors and send them between ranks, layer after layer."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..colossalai_support.accelerator import get_accelerator
from .config import CheckpointError
from .pieces import Box, TensorPiece
from .transfers import Read, Transfer

__all__ = ["AHEAD", "BoxMemory", "LayerRead", "ReadAhead", "Received", "exchange"]


# Box memory ----------------------------------------------------------------------------------------------------------


class BoxMemory:
    """The memory of boxes: parts of the rank's pieces, or memory of their own where it needs only a part or none."""

    def __init__(
        self, pieces: Iterable[TensorPiece], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
    ) -> None:
        self._pieces: dict[str, list[TensorPiece]] = defaultdict(list)
        for piece in pieces:
            assert not any(piece.box.intersection(other.box) for other in self._pieces[piece.key]), piece.key
            self._pieces[piece.key].append(piece)
        self._shapes, self._dtypes = shapes, dtypes
        self._lent: dict[str, list[TensorPiece]] = defaultdict(list)

    def holds(self, key: str, box: Box) -> bool:
        return _holder(self._pieces.get(key, ()), box) is not None

    def to_read(self, read: Read) -> TensorPiece:
        """The memory to read a box into; allocated now if it is not part of a piece."""
        piece = _holder(self._pieces.get(read.key, ()), read.box)
        if piece is not None:
            return replace(piece, box=read.box, data=_part(piece, read.box))
        data = torch.empty(read.box.sizes, dtype=getattr(torch, self._dtypes[read.key]))
        lent = TensorPiece(read.layer, read.key, self._shapes[read.key], read.box, data, "")
        self._lent[read.key].append(lent)
        return lent

    def keep(self, read: TensorPiece) -> None:
        """Copy what this rank needs of a box that is not part of a piece, after it was read."""
        if self.holds(read.key, read.box):
            return
        for piece in self._pieces.get(read.key, ()):
            common = piece.box.intersection(read.box)
            if common is not None:
                _part(piece, common).copy_(_part(read, common))

    def tensor(self, key: str, box: Box) -> Tensor:
        """The elements of a box that was read or is received: ``[box.sizes]``."""
        piece = _holder(self._pieces.get(key, ()), box) or _holder(self._lent[key], box)
        assert piece is not None, (key, box)
        return _part(piece, box)

    def free(self, key: str) -> None:
        """Free the memory of boxes of a tensor, unless it is part of a piece."""
        self._lent.pop(key, None)


def _holder(pieces: Iterable[TensorPiece], box: Box) -> TensorPiece | None:
    return next((piece for piece in pieces if piece.box.intersection(box) == box), None)


def _part(piece: TensorPiece, box: Box) -> Tensor:
    return piece.data[piece.box.slices_of(box)]


# Read ahead ----------------------------------------------------------------------------------------------------------


class LayerRead(NamedTuple):
    layer: str
    is_sent: bool
    """True if this takes memory until it is sent."""
    read: Callable[[], None]


class ReadAhead:
    """Thread that reads from one place. Leave its ``with`` block to stop it."""

    def __init__(self, layers: Sequence[LayerRead], ahead: int) -> None:
        self._layers = layers
        self._done = {layer.layer: threading.Event() for layer in layers}
        self._sent = {layer.layer for layer in layers if layer.is_sent}
        self._room = threading.Semaphore(ahead)
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="read checkpoint", daemon=True)
        self.problems: dict[str, str] = {}
        """Reasons why layers could not be read."""

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._room.release()

    def wait(self, layer: str) -> str | None:
        """Wait until a layer is read: None, or why it could not be read. None if there is nothing to read of it."""
        if layer not in self._done:
            return None
        self._done[layer].wait()
        if self._error is not None:
            raise self._error
        return self.problems.get(layer)

    def has_sent(self, layer: str) -> None:
        if layer in self._sent:
            self._room.release()

    def wait_for_all(self) -> None:
        for layer in self._done:
            self.wait(layer)

    def _run(self) -> None:
        try:
            for layer in self._layers:
                if layer.is_sent:
                    self._room.acquire()
                if self._stopped:
                    return
                try:
                    layer.read()
                except CheckpointError as error:
                    self.problems[layer.layer] = str(error)
                self._done[layer.layer].set()
        except BaseException as error:  # raised where somebody waits
            self._error = error
            for done in self._done.values():
                done.set()


# Exchange ------------------------------------------------------------------------------------------------------------


AHEAD = 2
"""Layers that are sent at the same time."""


class Received(NamedTuple):
    bytes: int
    missing: list[Transfer]
    """Boxes that the sender could not read."""


class _Message(NamedTuple):
    parts: list[Transfer]
    content: Tensor
    """``[bytes + 1]``: the boxes one after another; then 1, or 0 if they could not be read."""


class _Layer(NamedTuple):
    layer: str
    incoming: list[_Message]
    outgoing: list[_Message]
    works: list[dist.Work]


def exchange(
    order: Sequence[str], transfers: Sequence[Transfer], memory: BoxMemory, readers: Sequence[ReadAhead]
) -> Received:
    """Send what this rank reads and others need, and receive what it needs. Order and transfers are equal on all ranks.

    In each layer, two ranks exchange one message at most. A rank needs memory for :data:`AHEAD` layers and one more.
    """
    rank = dist.get_rank()
    by_layer: dict[str, list[Transfer]] = {layer: [] for layer in order}
    for transfer in transfers:
        if rank in (transfer.sender, transfer.receiver):
            by_layer[transfer.layer].append(transfer)
    received, missing = 0, []
    on_their_way: deque[_Layer] = deque()

    def finish() -> None:
        nonlocal received
        layer = on_their_way.popleft()
        for work in layer.works:
            work.wait()
        for message in layer.incoming:
            if _unpack(message, memory):
                received += message.content.numel() - 1
            else:
                missing.extend(message.parts)
        for message in layer.outgoing:
            for part in message.parts:
                memory.free(part.key)
        if layer.outgoing:
            for reader in readers:
                reader.has_sent(layer.layer)

    for layer, of_layer in by_layer.items():
        if of_layer:
            on_their_way.append(_start(layer, of_layer, rank, memory, readers))
        if len(on_their_way) > AHEAD:
            finish()
    while on_their_way:
        finish()
    return Received(received, missing)


def _start(
    layer: str, transfers: Sequence[Transfer], rank: int, memory: BoxMemory, readers: Sequence[ReadAhead]
) -> _Layer:
    device = _device()
    is_read = True
    if any(each.sender == rank for each in transfers):
        is_read = not any([reader.wait(layer) for reader in readers])
    operations: list[dist.P2POp] = []
    incoming, outgoing = [], []
    for sender, parts in _by(transfers, "sender", "receiver", rank):
        size = sum(tensor.numel() * tensor.element_size() for tensor in (memory.tensor(*each[3:]) for each in parts))
        incoming.append(_Message(parts, torch.empty(size + 1, dtype=torch.uint8, device=device)))
        operations.append(dist.P2POp(dist.irecv, incoming[-1].content, sender))
    for receiver, parts in _by(transfers, "receiver", "sender", rank):
        tensors = [memory.tensor(*each[3:]).contiguous().view(-1).view(torch.uint8) for each in parts]
        state = torch.tensor([is_read], dtype=torch.uint8, device=tensors[0].device)
        outgoing.append(_Message(parts, torch.cat([*tensors, state]).to(device)))
        operations.append(dist.P2POp(dist.isend, outgoing[-1].content, receiver))
    return _Layer(layer, incoming, outgoing, dist.batch_isend_irecv(operations))


def _unpack(message: _Message, memory: BoxMemory) -> bool:
    """Copy received boxes to where they belong; False if the sender could not read them."""
    if not message.content[-1].item():
        return False
    start = 0
    with torch.no_grad():
        for part in message.parts:
            target = memory.tensor(part.key, part.box)
            size = target.numel() * target.element_size()
            values = message.content[start : start + size].clone().view(target.dtype).view(target.shape)
            target.copy_(values)
            start += size
    return True


def _by(transfers: Sequence[Transfer], other: str, own: str, rank: int) -> list[tuple[int, list[Transfer]]]:
    """Transfers in which this rank has the role ``own``, by the rank with the role ``other``, ascending."""
    mine = sorted(
        (each for each in transfers if getattr(each, own) == rank), key=lambda each: (getattr(each, other), each)
    )
    return [(number, list(parts)) for number, parts in itertools.groupby(mine, key=lambda each: getattr(each, other))]


def _device() -> torch.device:
    """Device of the tensors of messages: the host, if a backend can send them from there."""
    if "cpu:" in str(dist.get_backend_config()):
        return torch.device("cpu")
    return get_accelerator().get_current_device()
