"""How much a migration sends, by formula: tests compare it with counts, the pre-test computes times from it.

Columns are sent in collectives and in messages that one sender starts and waits for, so the time is that of all
messages one after the other. Units of blocks travel between many pairs of ranks at the same time, and partly while
ranks compute, so what counts is the rank that waits for most.

Notation: ``M`` rows (of all micro-batches of an iteration), ``N`` outputs of a rank's weight, ``c`` columns that a
sender migrates to ``q`` receivers, in a group of ``e`` ranks. Elements, for every sender and layer:

==================  =============================================  ==================================================
method              column-parallel layer                          row-parallel layer
==================  =============================================  ==================================================
broadcast-reduce    broadcast (e−1)(Nc + MN), reduce (e−1)MN,      broadcast (e−1)(Nc + Mc),
                    point to point Nc                              point to point Mc + Nc
scatter-gather      point to point 2Nc + 2qMN + Mc                 point to point 2Nc + 2Mc + qMN
==================  =============================================  ==================================================

Weights are sent for every micro-batch: ``M`` counts all rows, and ``Nc`` must be multiplied by the number of
micro-batches. A ``block`` sends twice the elements of its migrated units, weights to the receiver and gradients back:
in each pass of a loop, and once for all passes of a pipeline's schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .costs import Traffic, Volume
from .divide import Move

__all__ = ["BlockShape", "LayerShape", "Port", "block_ports", "busiest_port", "column_traffic"]


@dataclass(frozen=True)
class LayerShape:
    """A layer on one rank: ``N`` outputs, ``L`` contraction columns."""

    outputs: int
    columns: int
    column_parallel: bool


@dataclass(frozen=True)
class BlockShape:
    """A block on one rank."""

    units: int
    elements_per_unit: int
    """The number of weights and biases of one unit in all layers."""
    layers: int


def column_traffic(
    layer: LayerShape, moves: Sequence[Move], rows: int, passes: int, ranks: int, method: str, bytes_per_element: int
) -> Traffic:
    """One layer's traffic in an iteration of ``passes`` micro-batches of ``rows`` rows each, over the whole group."""
    broadcast, reduce, direct = _Count(), _Count(), _Count()
    n, others = layer.outputs, ranks - 1
    for sender in sorted({move.sender for move in moves}):
        parts = [move.stop - move.start for move in moves if move.sender == sender]
        c, q = sum(parts), len(parts)
        if method == "broadcast-reduce":
            broadcast.add(others, n * c)
            if layer.column_parallel:
                reduce.add(others, rows * n)
                broadcast.add(others, rows * n)
            else:
                broadcast.add(others, rows * c)
                direct.add_parts(q, rows * c)
            direct.add_parts(q, n * c)
        else:
            direct.add_parts(2 * q, 2 * n * c)
            direct.add_parts(q, rows * c)
            if layer.column_parallel:
                direct.add(2 * q, rows * n)
            else:
                direct.add_parts(q, rows * c)
                direct.add(q, rows * n)
    scale = passes * bytes_per_element
    return Traffic(
        point_to_point=direct.volume(passes, scale),
        broadcast=broadcast.volume(passes, scale),
        reduce=reduce.volume(passes, scale),
    )


@dataclass(frozen=True)
class Port:
    """The messages of blocks of one rank in an optimizer step."""

    sent: Volume
    """All that it sends."""
    waited: Volume
    """What it sends or receives while it can compute nothing: its first bucket of weights, and gradients, which return
    layer by layer. Other weights arrive while the bucket before computes. Messages that start together count once."""


def block_ports(
    blocks: Sequence[BlockShape],
    moves: Sequence[Sequence[Move]],
    buckets: Sequence[int],
    ranks: int,
    bytes_per_element: int,
) -> list[Port]:
    """All blocks' messages in a forward and a backward pass, by rank; ``buckets`` has each block's bucket.

    Weights are sent in one message per bucket and pair of ranks, gradients in one per layer, sender and receiver.
    """
    ports = []
    for rank in range(ranks):
        weight_messages: set[tuple[int, int]] = set()
        first: int | None = None
        sent = waited = Volume()
        for block, moved, bucket in zip(blocks, moves, buckets, strict=True):
            bytes_per_unit = block.elements_per_unit * bytes_per_element
            given = [move for move in moved if move.sender == rank]
            taken = [move for move in moved if move.receiver == rank]
            if not given and not taken:
                continue
            weight_messages.update((bucket, move.receiver) for move in given)
            first = bucket if first is None else first
            given_bytes, taken_bytes = (
                bytes_per_unit * sum(move.stop - move.start for move in each) for each in (given, taken)
            )
            sent += Volume(block.layers * len(taken), given_bytes + taken_bytes)
            waited += Volume(block.layers, given_bytes + taken_bytes)
            if bucket == first:
                waited += Volume(0, given_bytes + taken_bytes)
        ports.append(
            Port(
                sent=sent + Volume(len(weight_messages), 0),
                waited=waited if first is None else waited + Volume(1, 0),
            )
        )
    return ports


def busiest_port(ports: Sequence[Port]) -> Volume:
    """The messages and the bytes that the ranks wait for; all ranks wait for the one that has the most."""
    return Volume(max(port.waited.messages for port in ports), max(port.waited.bytes for port in ports))


class _Count:
    """A running count of messages and elements."""

    def __init__(self) -> None:
        self._messages = self._elements = 0

    def add(self, messages: int, elements_each: int) -> None:
        self.add_parts(messages, messages * elements_each)

    def add_parts(self, messages: int, elements: int) -> None:
        self._messages += messages
        self._elements += elements

    def volume(self, passes: int, scale: int) -> Volume:
        return Volume(messages=self._messages * passes, bytes=self._elements * scale)
