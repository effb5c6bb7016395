"""Messages of migrated units: weights before a forward pass, gradients back in backward (docs/algorithms.md, 1.5).

The weights of many blocks (a *bucket*) are sent in one message per pair of ranks. When the first block of a bucket is
about to compute, a rank waits for it, and all ranks, in it or not (docs/how-it-works.md, one order of launches), start
the next bucket: no earlier, because queued messages can hold back products on a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from .block import Block, BlockWorkload
from .column_migration import MovedRange, moved_count
from .transport import Pending, Started, Transport, check_room
from .unit_layout import UnitRange, split_message
from .workload import Clock, Part, Selector

MESSAGE_BYTES = 4 << 20
"""Blocks are added to a bucket until their moved weights reach this size; larger messages would not be faster."""


@dataclass(eq=False)
class BlockTransfer:
    block: Block
    given: list[MovedRange]  # units of this rank that other ranks compute, in ascending order
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
    number, size, last_dtype = 0, 0, None
    for block, moved in zip(blocks, moves, strict=True):
        dtype = block.parameters[0][0].dtype
        if size >= MESSAGE_BYTES or last_dtype not in (None, dtype):
            number, size = number + 1, 0
        numbers.append(number)
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


class UnitExchange:
    """Exchanges units of blocks between one rank and the others of its group. It waits for what this rank receives; for
    the ranks that receive from it only before it uses the same memory again, in the next iteration."""

    def __init__(self, transport: Transport, clock: Clock | None = None) -> None:
        self._transport = transport
        self._clock = clock
        self._transfers: list[BlockTransfer] = []
        self._buckets: list[Bucket] = []
        self._started_buckets = 0  # number of buckets whose messages have been started since the weights changed
        self._returning: dict[tuple[BlockTransfer, int], tuple[Started, list[tuple[int, Tensor]]]] = {}
        """Gradients that are being sent to their owners, with the tensors that they are sent from, by layer."""
        self._are_sent = False
        self._growth = self.largest_growth = (0, 0.0)
        """:func:`peak_growth` of the present plan, and the largest so far, which the peak so far includes."""
        self._has_trained = False

    def assign(
        self,
        blocks: Sequence[Block],
        moves: Sequence[Sequence[MovedRange]],
        kept: Sequence[int],
        select: Sequence[Selector | None],
    ) -> None:
        """Migrate each block's ``moves``, and compute ``kept`` of this rank's own units, from the next iteration on.
        ``select`` chooses the kept units if some are pruned."""
        self.release(blocks)
        rank = self._transport.rank
        buckets: dict[int, Bucket] = defaultdict(Bucket)
        numbers = bucket_numbers(blocks, moves)
        for block, moved, count, rule, number in zip(blocks, moves, kept, select, numbers, strict=True):
            given = [move for move in moved if move.sender == rank]
            taken = [move for move in moved if move.receiver == rank]
            if count == block.units and not moved:
                continue
            transfer = BlockTransfer(block, given, taken)
            workload = BlockWorkload(
                given=moved_count(given),
                taken=tuple(UnitRange(move.sender, move.start, move.stop) for move in taken),
                kept=count,
                select=rule,
            )
            block.assign(workload, partial(self._receive, transfer), partial(self._return, transfer))
            self._transfers.append(transfer)
            if given or taken:
                transfer.bucket = buckets[number]
                transfer.bucket.transfers.append(transfer)
        self._check_room()
        self._buckets = [buckets[number] for number in sorted(buckets)]
        first_blocks: dict[int, Block] = {}
        for block, number in zip(blocks, numbers, strict=True):
            first_blocks.setdefault(number, block)
        for number, bucket in sorted(buckets.items()):
            bucket.number = number
            bucket.reserve()
            if number > 0:
                first_blocks[number - 1].before_forward = partial(self._start_buckets, number)
        check_backward_memory(self._transfers)

    def _check_room(self) -> None:
        self._growth = more_bytes, more_work = peak_growth(self._transfers)
        bytes_before, work_before = self.largest_growth
        if more_bytes > bytes_before or more_work > work_before:
            device = self._transfers[0].block.parameters[0][0].device
            check_room(device, max(0, more_bytes - bytes_before), max(0.0, more_work - work_before))

    def release(self, blocks: Sequence[Block]) -> None:
        self.end_iteration()
        self._wait_for_receivers()
        for bucket in self._buckets:
            # It and its transfers refer to each other, so their memory would stay until the garbage collector runs.
            bucket.transfers.clear()
        self._transfers, self._buckets = [], []
        for block in blocks:
            block.assign(None)
            block.before_forward = None

    def begin_pass(self, number: int = 1) -> None:
        """Start sending the units' weights; later buckets follow while the blocks run. Collective over the group; call
        it before each forward pass of training. Weights are sent each time, because a loop may change them without a
        trace, but only before the first pass of a schedule, whose passes have a ``number`` from 1 on."""
        if number == 1:
            self._refresh()
        self._send()

    def _send(self) -> None:
        if self._are_sent or not self._buckets:
            return
        self._are_sent = True
        self._mark("other", None)
        self._wait_for_receivers()
        self._mark("migration", None)
        self._start_buckets(0)

    def _start_buckets(self, last_number: int) -> None:
        while self._are_sent and self._started_buckets < len(self._buckets):
            bucket = self._buckets[self._started_buckets]
            if bucket.number > last_number:
                break
            self._started_buckets += 1
            for other, message in bucket.send_buffers.items():
                torch.cat([part.reshape(-1) for part in weights_for(bucket, other)], out=message)
            if self._has_trained:
                bucket.keep_received()
            bucket.started = self._transport.exchange(
                list(bucket.send_buffers.items()), list(bucket.receive_buffers.items())
            )

    def before_step(self) -> None:
        """Prepare for an optimizer step: weights change, and kept units are chosen again."""
        self.end_iteration()
        self._has_trained = False
        (more_bytes, more_work), (bytes_before, work_before) = self._growth, self.largest_growth
        self.largest_growth = max(more_bytes, bytes_before), max(more_work, work_before)

    def end_iteration(self) -> None:
        """Send units again before the next pass, and choose kept units again."""
        self._refresh()
        for transfer in self._transfers:
            transfer.block.begin_iteration()

    def _refresh(self) -> None:
        if self._buckets:
            # Also those of blocks that did not run: another rank may have started its part of their messages.
            self._start_buckets(self._buckets[-1].number)
        for bucket in self._buckets:
            bucket.started.received.wait()
        for transfer in self._transfers:
            transfer.block.refresh()
        self._has_trained |= self._are_sent
        self._are_sent, self._started_buckets = False, 0

    def _mark(self, part: Part, kind: int | None) -> None:
        if self._clock is not None:
            self._clock.mark(part, kind)

    def _wait_for_receivers(self) -> None:
        """Return when all that this rank has sent has arrived, so that its memory can be used again."""
        for bucket in self._buckets:
            bucket.started.sent.wait()
        for started, _ in self._returning.values():
            started.sent.wait()
        self._returning.clear()

    def _receive(self, transfer: BlockTransfer) -> list[list[list[Tensor]]]:
        if transfer.bucket is None:
            return []
        self._send()
        self._start_buckets(transfer.bucket.number)
        self._mark("other", transfer.block.kind)
        transfer.bucket.started.received.wait()
        self._mark("migration", transfer.block.kind)
        return [unpack(transfer, move) for move in transfer.taken]

    def _return(self, transfer: BlockTransfer, layer: int, gradients: list[Tensor]) -> list[list[Tensor]]:
        if transfer.bucket is None:
            return []
        places, parameters = transfer.block.places[layer], transfer.block.parameters[layer]
        elements = sum(place.numel(tensor) for place, tensor in zip(places, parameters, strict=True))
        sends = [(move.sender, message) for move, message in zip(transfer.taken, gradients, strict=True)]
        receives = [(move.receiver, parameters[0].new_empty(moved_count([move]) * elements)) for move in transfer.given]
        if earlier := self._returning.get((transfer, layer)):
            earlier[0].sent.wait()
        # Do not wait for the owner: it may be late, and this rank continues in the meantime.
        started = self._transport.exchange(sends, receives)
        self._returning[transfer, layer] = started, sends
        if not receives:
            return []
        self._mark("block", transfer.block.kind)
        started.received.wait()
        self._mark("migration", transfer.block.kind)
        return [
            split_message(message, places, parameters, moved_count([move]))[0]
            for move, (_, message) in zip(transfer.given, receives, strict=True)
        ]
