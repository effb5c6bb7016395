"""How much a migration sends, by formula: tests compare it with counts, the pre-test computes times from it.

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
micro-batches. A ``block`` sends twice the elements of its migrated units per optimizer step: weights to the receiver
and gradients back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .costs import Traffic, Volume
from .divide import Move

__all__ = ["BlockShape", "LayerShape", "block_traffic", "column_traffic"]


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


def block_traffic(
    blocks: Sequence[BlockShape], moves: Sequence[Sequence[Move]], buckets: Sequence[int], bytes_per_element: int
) -> Traffic:
    """All blocks' traffic in an optimizer step; ``buckets`` has the number of each block's bucket."""
    weight_messages = {
        (bucket, move.sender, move.receiver) for bucket, moved in zip(buckets, moves, strict=True) for move in moved
    }
    returns = sum(block.layers * len(moved) for block, moved in zip(blocks, moves, strict=True))
    elements = sum(
        block.elements_per_unit * (move.stop - move.start)
        for block, moved in zip(blocks, moves, strict=True)
        for move in moved
    )
    volume = Volume(messages=len(weight_messages) + returns, bytes=2 * elements * bytes_per_element)
    return Traffic(point_to_point=volume, broadcast=Volume(), reduce=Volume())


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
