"""The units of blocks that a rank gives and takes, and their messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .block import Block
from .column_migration import MovedRange, moved_count
from .transport import Pending, Started
from .unit_layout import split_message

MESSAGE_BYTES = 4 << 20
"""Blocks are added to a bucket until their moved weights reach this size; larger messages would not be faster."""


@dataclass(eq=False)
class BlockTransfer:
    block: Block
    given: list[MovedRange]
    """Units of this rank that other ranks compute, in ascending order."""
    taken: list[MovedRange]
    bucket: Bucket | None = None


@dataclass(eq=False)
class Bucket:
    """Blocks whose weights are sent together, with a buffer for each message, by the other rank."""

    transfers: list[BlockTransfer] = field(default_factory=list)
    send_buffers: dict[int, Tensor] = field(default_factory=dict)
    receive_buffers: dict[int, Tensor] = field(default_factory=dict)
    started: Started = field(default_factory=lambda: Started(Pending(()), Pending(())))
    number: int = 0

    def keep_received(self) -> None:
        """Receive into other memory from now on, because a backward pass may need what is there."""
        lengths = {other: len(message) for other, message in self.receive_buffers.items()}
        self.receive_buffers.clear()
        like = self.transfers[0].block.parameters[0][0]
        self.receive_buffers.update({other: like.new_empty(length) for other, length in lengths.items()})

    def reserve(self) -> None:
        like = self.transfers[0].block.parameters[0][0]
        for buffers, direction, other in (
            (self.send_buffers, "given", "receiver"),
            (self.receive_buffers, "taken", "sender"),
        ):
            lengths: dict[int, int] = {}
            for transfer in self.transfers:
                for move in getattr(transfer, direction):
                    elements = moved_count([move]) * transfer.block.elements_per_unit
                    lengths[getattr(move, other)] = lengths.get(getattr(move, other), 0) + elements
            buffers.update({other: like.new_empty(length) for other, length in sorted(lengths.items())})


def bucket_numbers(blocks: Sequence[Block], moves: Sequence[Sequence[MovedRange]]) -> list[int]:
    """Bucket number of each block, the same on all ranks. A bucket ends when it has :data:`MESSAGE_BYTES`, or when the
    next block has another dtype."""
    numbers: list[int] = []
    size, last_dtype = 0, None
    for block, moved in zip(blocks, moves, strict=True):
        dtype = block.parameters[0][0].dtype
        if not numbers:
            numbers.append(0)
        elif size >= MESSAGE_BYTES or last_dtype != dtype:
            numbers.append(numbers[-1] + 1)
            size = 0
        else:
            numbers.append(numbers[-1])
        last_dtype = dtype
        size += moved_count(moved) * block.elements_per_unit * dtype.itemsize
    return numbers


def peak_growth(transfers: Sequence[BlockTransfer]) -> tuple[int, float]:
    """Additional memory of an iteration with ``transfers``: bytes of the buffers and of the taken units' gradients,
    which are kept once and packed once; and activations, as a share of those of own units."""
    given = taken = own = 0
    for each in transfers:
        unit_bytes = each.block.elements_per_unit * each.block.parameters[0][0].element_size()
        given += unit_bytes * moved_count(each.given)
        taken += unit_bytes * moved_count(each.taken)
        own += unit_bytes * each.block.units
    return given + 3 * taken, taken / own if taken else 0.0


def check_backward_memory(transfers: Sequence[BlockTransfer]) -> None:
    """Allocate, and release at once, the memory for gradients of the backward pass: of taken units until they have
    returned, of the rank's own where none exist yet, and of one layer before they are sent or added up. Activations
    depend on the batch, and are not included; on a GPU see :func:`peak_growth`."""
    room, largest = [], 0
    for transfer in transfers:
        taken = moved_count(transfer.taken)
        for layer, tensors, places in zip(
            transfer.block.layers, transfer.block.parameters, transfer.block.places, strict=True
        ):
            if taken and layer.weight.requires_grad:  # type: ignore[attr-defined]
                elements = sum(place.numel(tensor) for tensor, place in zip(tensors, places, strict=True))
                whole = sum(tensor.numel() for tensor in tensors)
                own = whole if layer.weight.grad is None else 0  # type: ignore[attr-defined]
                room.append(tensors[0].new_empty(taken * elements + own))
                largest = max(largest, taken * elements + whole)
    if room:
        room.append(room[0].new_empty(largest))


def weights_for(bucket: Bucket, other: int) -> list[Tensor]:
    """Views of the bucket's units that are sent to rank ``other``, in the order of blocks, layers, tensors."""
    return [
        place.view(tensor).narrow(place.unit_dim, move.start, move.stop - move.start)
        for transfer in bucket.transfers
        for move in transfer.given
        if move.receiver == other
        for tensors, places in zip(transfer.block.parameters, transfer.block.places, strict=True)
        for tensor, place in zip(tensors, places, strict=True)
    ]


def unpack(transfer: BlockTransfer, move: MovedRange) -> list[list[Tensor]]:
    """The weights of the moved units by layer and tensor, as views of the message that contains them."""
    assert transfer.bucket is not None
    message = transfer.bucket.receive_buffers[move.sender]
    offset = 0
    for earlier in transfer.bucket.transfers:
        if earlier is transfer:
            break
        count = moved_count(other for other in earlier.taken if other.sender == move.sender)
        offset += count * earlier.block.elements_per_unit
    layers = []
    for tensors, places in zip(transfer.block.parameters, transfer.block.places, strict=True):
        views, used = split_message(message[offset:], places, tensors, moved_count([move]))
        layers.append(views)
        offset += used
    return layers
