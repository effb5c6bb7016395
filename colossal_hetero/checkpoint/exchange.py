"""Read boxes of tensors and send them between ranks, layer after layer."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..colossalai_support.accelerator import get_accelerator
from .config import CheckpointError
from .pieces import Box, Location, TensorPiece
from .transfers import Fetch, Need, Read, Transfer, layer_order, reads_and_transfers


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


class _ReadAhead:
    """Thread that reads layers from one place. Leave its ``with`` block to stop it."""

    def __init__(self, reads: Mapping[str, Callable[[], None]], sent: Collection[str]) -> None:
        self._reads, self._sent = reads, sent
        self._done: dict[str, Future[None]] = {layer: Future() for layer in reads}
        self._room = threading.Semaphore(AHEAD + 1)
        self._stopped = False

    def __enter__(self) -> _ReadAhead:
        threading.Thread(target=self._run, name="read checkpoint", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._room.release()

    def wait(self, layer: str) -> bool:
        """Wait until a layer is read; false if it could not be read."""
        error = self._done[layer].exception() if layer in self._done else None
        if error is not None and not isinstance(error, CheckpointError):
            raise error
        return error is None

    def has_sent(self, layer: str) -> None:
        if layer in self._sent:
            self._room.release()

    def problems(self) -> dict[str, str]:
        """Reasons why layers could not be read, after waiting for all."""
        return {layer: str(done.exception()) for layer, done in self._done.items() if not self.wait(layer)}

    def _run(self) -> None:
        for layer, read in self._reads.items():
            if layer in self._sent:
                self._room.acquire()
            if self._stopped:
                return
            try:
                read()
            except BaseException as error:  # raised where somebody waits
                self._done[layer].set_exception(error)
            else:
                self._done[layer].set_result(None)


AHEAD = 2  # layers that are sent at the same time


class Outcome(NamedTuple):
    problems: list[tuple[str, Location, str]]
    left: list[Need]  # what this rank did not get, because it or a sender could not read it
    received_bytes: int = 0


def fetch_boxes(
    fetches: Mapping[int, Sequence[Fetch]],
    node_of: Mapping[int, str],
    memory: BoxMemory,
    fill: Callable[[Sequence[TensorPiece]], None],
) -> Outcome:
    """Read boxes of this rank's node with ``fill``, and exchange them with other ranks.

    Every rank calls it, with the same fetches. One layer after the other is on its way, so that memory for few layers
    is needed.
    """
    rank = dist.get_rank()
    reads, transfers = reads_and_transfers(fetches, node_of)
    order = layer_order(reads)
    sending = {each.layer for each in transfers if each.sender == rank}
    by_location: dict[Location, dict[str, list[Read]]] = defaultdict(lambda: defaultdict(list))
    for read in sorted(reads[rank], key=lambda read: (read.location, order.index(read.layer))):
        by_location[read.location][read.layer].append(read)

    @torch.no_grad()
    def load(of_layer: Sequence[Read]) -> None:
        targets = [memory.to_read(read) for read in of_layer]
        fill(targets)
        for target in targets:
            memory.keep(target)
            if target.layer not in sending:
                memory.free(target.key)

    lent = {(each.location, each.layer) for each in reads[rank] if not memory.holds(each.key, each.box)}
    with ExitStack() as stack:
        readers = {}
        for location, by_layer in by_location.items():
            tasks = {layer: partial(load, of_layer) for layer, of_layer in by_layer.items()}
            sent = {layer for layer in sending if (location, layer) in lent}
            readers[location] = stack.enter_context(_ReadAhead(tasks, sent))
        received, missing = _exchange(order, transfers, memory, list(readers.values()))
        found = {location: reader.problems() for location, reader in readers.items()}
    problems = [(layer, location, why) for location, of_location in found.items() for layer, why in of_location.items()]
    unread = {(layer, location) for layer, location, _ in problems}
    unsent = {(each.key, each.box) for each in missing}
    left = [
        Need(read.layer, read.key, box, size // box.numel)
        for box, size, read in fetches[rank]
        if (read.layer, read.location) in unread or (read.key, box) in unsent
    ]
    return Outcome(problems, left, received)


class _Message(NamedTuple):
    parts: list[Transfer]
    content: Tensor  # ``[bytes + 1]``: the boxes one after another; then 1, or 0 if they could not be read


class _Layer(NamedTuple):
    layer: str
    incoming: list[_Message]
    outgoing: list[_Message]
    works: list[dist.Work]


def _exchange(
    order: Sequence[str], transfers: Sequence[Transfer], memory: BoxMemory, readers: Sequence[_ReadAhead]
) -> tuple[int, list[Transfer]]:
    """Send what this rank reads and others need, and receive what it needs: in each layer, two ranks exchange one
    message at most. Order and transfers are equal on all ranks. Returns the bytes received, and what could not be sent.
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
    return received, missing


def _start(
    layer: str, transfers: Sequence[Transfer], rank: int, memory: BoxMemory, readers: Sequence[_ReadAhead]
) -> _Layer:
    device = _device()
    is_read = True
    if any(each.sender == rank for each in transfers):
        is_read = all([reader.wait(layer) for reader in readers])
    operations: list[dist.P2POp] = []
    incoming, outgoing = [], []
    by_rank: dict[tuple[bool, int], list[Transfer]] = defaultdict(list)
    for each in sorted(transfers):
        is_sent = each.sender == rank
        by_rank[is_sent, each.receiver if is_sent else each.sender].append(each)
    for (is_sent, other), parts in sorted(by_rank.items()):
        tensors = [memory.tensor(part.key, part.box) for part in parts]
        if is_sent:
            state = torch.tensor([is_read], dtype=torch.uint8, device=tensors[0].device)
            flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
            outgoing.append(_Message(parts, torch.cat([*flat, state]).to(device)))
            operations.append(dist.P2POp(dist.isend, outgoing[-1].content, other))
        else:
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            incoming.append(_Message(parts, torch.empty(size + 1, dtype=torch.uint8, device=device)))
            operations.append(dist.P2POp(dist.irecv, incoming[-1].content, other))
    return _Layer(layer, incoming, outgoing, dist.batch_isend_irecv(operations))


def _unpack(message: _Message, memory: BoxMemory) -> bool:
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


def _device() -> torch.device:
    if "cpu:" in str(dist.get_backend_config()):
        return torch.device("cpu")
    return get_accelerator().get_current_device()
