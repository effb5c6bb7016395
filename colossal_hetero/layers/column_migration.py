"""Migration of contraction columns, product by product (SEMI, Sec. IV-A): the column form. A *sender* gives the columns
``P`` of its product to *receivers*; receiver ``r`` computes ``P_r ⊂ P``. What is sent in the forward and the backward
pass is in docs/algorithms.md, 1.4; the notation is that of :mod:`.product`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..colossalai_support.corrections import without_second_derivatives
from .product import ProductContext, run
from .transport import Transport
from .workload import Slowdown, matrix_view


class MovedRange(Protocol):
    """Columns (or units) ``[start, stop)`` of ``sender``, which ``receiver`` computes."""

    @property
    def sender(self) -> int: ...
    @property
    def receiver(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


def moved_count(moves: Iterable[MovedRange]) -> int:
    """The number of columns (or units) of all ``moves``."""
    return sum(move.stop - move.start for move in moves)


class BroadcastReduce:
    """The paper's method: broadcasts, in which fast ranks forward data for the slow one, and reductions. ``moves`` are
    those of one sender; ``like`` has the dtype and device."""

    merges = True
    """True if a receiver adds terms of dX or Y to its own product, for the all-reduce that runs in any case."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def distribute(
        self, moves: Sequence[MovedRange], given: Tensor | None, like: Tensor, rows: int
    ) -> list[Tensor | None]:
        """Send each receiver its columns of ``given [rows, |P|]``, which is None except on the sender. Returns, for
        every move, ``[rows, stop − start]`` on its receiver, else None."""
        first, last = moves[0].start, moves[-1].stop
        whole = self.broadcast(moves, given, (rows, last - first), like)
        return [
            # A copy, so that the rest of the broadcast matrix is not kept until the backward pass.
            None if whole is None or move.receiver != self.transport.rank
            else whole[:, move.start - first : move.stop - first].contiguous()
            for move in moves
        ]  # fmt: skip

    def broadcast(
        self, moves: Sequence[MovedRange], given: Tensor | None, shape: tuple[int, int], like: Tensor
    ) -> Tensor | None:
        """Send all of ``given`` (of ``shape``; None except on the sender) to every receiver. Returns it on these ranks;
        other ranks may get None."""
        whole = like.new_empty(shape) if given is None else given.contiguous()
        self.transport.broadcast(whole, moves[0].sender)
        return whole

    def reduce(self, moves: Sequence[MovedRange], result: Tensor) -> None:
        """Add every receiver's ``result`` to the sender's in place; results of other ranks may be overwritten."""
        self.transport.reduce(result, moves[0].sender)

    def gather(
        self,
        moves: Sequence[MovedRange],
        results: Sequence[Tensor | None],
        into: Tensor | None,
        like: Tensor,
        rows: int,
    ) -> None:
        """Return every receiver's ``[rows, stop − start]`` to the sender, which stores them in ``into``, its whole
        matrix ``[rows, L]`` (None on other ranks)."""
        rank = self.transport.rank
        sends = [
            (move.sender, result.contiguous())
            for move, result in zip(moves, results, strict=True)
            if move.receiver == rank and result is not None
        ]
        parts = [(move, like.new_empty(rows, move.stop - move.start)) for move in moves if move.sender == rank]
        self.transport.exchange(sends, [(move.receiver, part) for move, part in parts]).wait()
        for move, part in parts:
            assert into is not None
            into[:, move.start : move.stop] = part


class ScatterGather(BroadcastReduce):
    """The method that the paper compares with: the sender exchanges messages with each receiver."""

    merges = False

    def distribute(
        self, moves: Sequence[MovedRange], given: Tensor | None, like: Tensor, rows: int
    ) -> list[Tensor | None]:
        first, rank = moves[0].start, self.transport.rank
        sends = [] if given is None else [
            (move.receiver, given[:, move.start - first : move.stop - first].contiguous()) for move in moves
        ]  # fmt: skip
        parts = [like.new_empty(rows, move.stop - move.start) if move.receiver == rank else None for move in moves]
        receives = [(move.sender, part) for move, part in zip(moves, parts, strict=True) if part is not None]
        self.transport.exchange(sends, receives).wait()
        return parts

    def broadcast(
        self, moves: Sequence[MovedRange], given: Tensor | None, shape: tuple[int, int], like: Tensor
    ) -> Tensor | None:
        sender, rank = moves[0].sender, self.transport.rank
        if rank == sender:
            assert given is not None
            given = given.contiguous()
            self.transport.exchange([(move.receiver, given) for move in moves], []).wait()
            return given
        if all(move.receiver != rank for move in moves):
            return None
        whole = like.new_empty(shape)
        self.transport.exchange([], [(sender, whole)]).wait()
        return whole

    def reduce(self, moves: Sequence[MovedRange], result: Tensor) -> None:
        sender, rank = moves[0].sender, self.transport.rank
        if rank == sender:
            parts = [torch.empty_like(result) for _ in moves]
            self.transport.exchange([], [(move.receiver, part) for move, part in zip(moves, parts, strict=True)]).wait()
            for part in parts:
                result += part
        elif any(move.receiver == rank for move in moves):
            self.transport.exchange([(sender, result)], []).wait()


COLUMN_EXCHANGES = {"broadcast-reduce": BroadcastReduce, "scatter-gather": ScatterGather}


@dataclass(frozen=True)
class ColumnMigration:
    """Assignment of one layer's columns to ranks; the same on all ranks of the group."""

    exchange: BroadcastReduce
    moves: tuple[MovedRange, ...]
    """Grouped by sender, in ascending order of their columns; each sender gives away its last columns."""

    @property
    def rank(self) -> int:
        return self.exchange.transport.rank

    @property
    def by_sender(self) -> list[tuple[MovedRange, ...]]:
        senders = sorted({move.sender for move in self.moves})
        return [tuple(move for move in self.moves if move.sender == sender) for sender in senders]

    @property
    def given(self) -> int:
        return moved_count(move for move in self.moves if move.sender == self.rank)


@dataclass(slots=True, kw_only=True)
class MigratedProductContext(ProductContext):
    """``lineage`` has the kept columns of those that are not given away."""

    migration: ColumnMigration
    column_parallel: bool

    def kept_part(self, matrix: Tensor, columns: int) -> Tensor:
        if self.lineage is not None:
            return matrix.index_select(-1, self.lineage.kept)
        return matrix.narrow(-1, 0, columns - self.migration.given)

    def at_full_size(self, part: Tensor, name: str, backward_pass: int, columns: int) -> Tensor:
        """The gradient ``[…, columns]`` from this rank's ``part``: imputed where pruned, zero where given away."""
        full = part.new_zeros(*part.shape[:-1], columns)
        rest = columns - self.migration.given
        if self.lineage is not None:
            part = self.lineage.restore(name, backward_pass, part, -1, rest)
        full.narrow(-1, 0, rest).copy_(part)
        return full


@without_second_derivatives
class _MigratedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: MigratedProductContext) -> Tensor:
        how.mark("other")
        rank, exchange = how.migration.rank, how.migration.exchange
        matrix = how.layout.as_matrix(weight)
        columns = matrix.shape[1]
        rows = matrix_view(x)
        ctx.how, ctx.use_bias, ctx.shape = how, bias is not None, x.shape
        own_x, own_weight = how.kept_part(rows, columns), how.kept_part(matrix, columns)
        y = run(lambda: torch.nn.functional.linear(own_x, own_weight, bias), how.slow_down)
        how.mark("matmul")
        received: list[tuple[MovedRange, Tensor, Tensor]] = []
        for moves in how.migration.by_sender:
            sender, first, last = moves[0].sender, moves[0].start, moves[-1].stop
            weights = exchange.distribute(
                moves, matrix[:, first:last] if rank == sender else None, matrix, matrix.shape[0]
            )
            if how.column_parallel:
                inputs: list[Tensor | None] = [rows[:, move.start : move.stop] for move in moves]
            else:
                inputs = exchange.distribute(
                    moves, rows[:, first:last] if rank == sender else None, rows, rows.shape[0]
                )
            how.mark("migration")
            result = y if rank == sender else None
            for move, part, part_x in zip(moves, weights, inputs, strict=True):
                if part is None or part_x is None or move.receiver != rank:
                    continue
                received.append((move, part, part_x))
                if not how.column_parallel and exchange.merges:
                    _add_product(y, part_x, part.t(), how.slow_down)
                else:
                    result = _product(part_x, part.t(), how.slow_down)
            how.mark("matmul")
            if how.column_parallel or not exchange.merges:
                exchange.reduce(moves, torch.zeros_like(y) if result is None else result)
                how.mark("migration")
        # In a column-parallel layer the received columns of X are part of this rank's X, which is saved in any case.
        ctx.moves = [move for move, _, _ in received]
        parts = [part for _, part, _ in received]
        inputs_kept = [] if how.column_parallel else [part_x for _, _, part_x in received]
        saved_x = rows if received and how.column_parallel else own_x
        ctx.save_for_backward(saved_x, weight, *parts, *inputs_kept)
        return y.view(*x.shape[:-1], matrix.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:  # type: ignore[override]
        how: MigratedProductContext = ctx.how
        how.mark("other")
        rank, exchange = how.migration.rank, how.migration.exchange
        x, weight, *kept = ctx.saved_tensors
        parts, inputs = kept[: len(ctx.moves)], kept[len(ctx.moves) :]
        matrix = how.layout.as_matrix(weight)
        outputs, columns = matrix.shape
        dy = matrix_view(dy.contiguous())
        own_x = x if x.shape[1] != columns or not ctx.moves else how.kept_part(x, columns)
        own_weight = how.kept_part(matrix, columns)
        backward_pass = how.lineage.begin_backward() if how.lineage is not None else 0
        wants_weight = ctx.needs_input_grad[1]
        dx = run(lambda: dy @ own_weight, how.slow_down)
        dx = how.at_full_size(dx, "input", backward_pass, columns)
        how.mark("matmul")

        taken = dict(zip([(move.sender, move.start) for move in ctx.moves], range(len(ctx.moves)), strict=True))
        dw_results: dict[tuple[int, int], Tensor] = {}
        for moves in how.migration.by_sender:
            sender = moves[0].sender
            their_dy: Tensor | None = dy
            if how.column_parallel:
                shape = (dy.shape[0], outputs)
                their_dy = exchange.broadcast(moves, dy if rank == sender else None, shape, dy)
                how.mark("migration")
            results: list[Tensor | None] = []
            for move in moves:
                place = taken.get((move.sender, move.start))
                if place is None:
                    results.append(None)
                    continue
                assert their_dy is not None
                part = parts[place]
                if how.column_parallel and exchange.merges:
                    _add_product(dx[:, move.start : move.stop], their_dy, part, how.slow_down)
                    results.append(None)
                else:
                    results.append(_product(their_dy, part, how.slow_down))
                if wants_weight:
                    part_x = x[:, move.start : move.stop] if how.column_parallel else inputs[place]
                    dw_results[move.sender, move.start] = _product(their_dy.t(), part_x, how.slow_down)
            how.mark("matmul")
            if not (how.column_parallel and exchange.merges):
                exchange.gather(moves, results, dx if rank == sender else None, dy, dy.shape[0])
                how.mark("migration")
        handle = None
        if how.group is not None:
            handle = dist.all_reduce(dx, group=how.group, async_op=True)

        dw = None
        if wants_weight:
            dw = run(lambda: dy.t() @ own_x, how.slow_down)
            dw = how.at_full_size(dw, "weight", backward_pass, columns)
            how.mark("matmul" if handle is None else "overlapped")
            for moves in how.migration.by_sender:
                results = [dw_results.get((move.sender, move.start)) for move in moves]
                exchange.gather(moves, results, dw if rank == moves[0].sender else None, dw, outputs)
            how.mark("migration")
            dw = how.layout.from_matrix(dw)
        db = dy.sum(dim=0) if ctx.use_bias else None
        how.mark("other")
        if handle is not None:
            handle.wait()
            how.mark("communication")
        return dx.view(ctx.shape), dw, db, None


def _product(left: Tensor, right: Tensor, slow_down: Slowdown | None) -> Tensor:
    return run(lambda: left @ right, slow_down)


def _add_product(to: Tensor, left: Tensor, right: Tensor, slow_down: Slowdown | None) -> None:
    if slow_down is None:
        to.addmm_(left, right)
    else:
        to += _product(left, right, slow_down)


migrated_product: Callable[[Tensor, Tensor, Tensor | None, MigratedProductContext], Tensor] = _MigratedProduct.apply
"""``Y [..., N] = X [..., L] · Wᵀ + b`` with migrated columns (module's docstring); collective over their group."""
