"""The cross entropy of logits that are divided over ranks in any way, not only in equal parts.

Of each token's logits the loss needs three numbers that are reduced over the group: the largest logit, the sum of the
exponentials, and the logit of the target. So it does not matter which rank holds which rows of the vocabulary, and no
logits are sent. Colossal-AI's ``cross_entropy_1d`` computes the same for equal parts, with the same messages, so ranks
that a plan leaves as they are can go on using it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from colossalai.shardformer.layer import loss as colossalai_loss
from torch import Tensor

from ...corrections.second_derivatives import without_second_derivatives
from ..workload import Clock

__all__ = ["VocabularyRows", "accept_any_rows", "end_expecting", "expect_rows"]


@dataclass(frozen=True)
class VocabularyRows:
    """Which rows of the vocabulary the logits of the current pass have.

    Args:
        numbers: the row of each logit, int64 ``[n]``, each row on one rank of the group only.
        vocabulary: how many rows there are; rows with higher numbers are padding.
    """

    numbers: Tensor
    vocabulary: int

    @cached_property
    def are_padding(self) -> Tensor:
        """bool ``[n]``"""
        return self.numbers >= self.vocabulary

    def columns_of(self, target: Tensor) -> Tensor:
        """For each target, int64 ``[T]``, the column of its logit, or -1 if another rank has it or it is ignored."""
        return self._columns[target.where(target >= 0, self.vocabulary)]

    @cached_property
    def _columns(self) -> Tensor:
        """For each row of the vocabulary the column of its logit or -1; the last entry is for ignored targets."""
        columns = self.numbers.new_full((self.vocabulary + 1,), -1)
        # Padding goes to the last entry, because leaving it out would make the host wait for a GPU to count the rest.
        own = torch.arange(len(self.numbers), device=columns.device)
        columns.scatter_(0, self.numbers.clamp(max=self.vocabulary), own)
        columns[self.vocabulary :] = -1
        return columns


_colossalais: Callable[..., Tensor] = colossalai_loss.cross_entropy_1d
_expected: list[tuple[VocabularyRows | None, Clock | None]] = []


def expect_rows(rows: VocabularyRows | None, clock: Clock | None = None) -> None:
    """Let the next loss take its logits for these rows; None: for Colossal-AI's equal parts.

    ``clock`` receives a mark around each collective of that loss.
    """
    _expected[:] = [(rows, clock)]


def end_expecting() -> bool:
    """Later losses are of equal parts. Returns whether a loss was computed since :func:`expect_rows`."""
    was_computed = not _expected
    _expected.clear()
    return was_computed


def accept_any_rows() -> None:
    """From now on Colossal-AI's models compute their loss from whatever rows :func:`expect_rows` was told."""
    colossalai_loss.cross_entropy_1d = cross_entropy_1d


@torch.compiler.disable
def cross_entropy_1d(
    vocab_logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    mode: str = "mean",
) -> Tensor:
    """In place of Colossal-AI's function of this name, with the same arguments."""
    rows, clock = _expected.pop() if _expected else (None, None)
    if rows is None:
        return _colossalais(vocab_logits, labels, ignore_index, process_group, vocab_size, dtype, mode)
    total = _CrossEntropy.apply(vocab_logits, labels, rows, ignore_index, process_group, clock)
    return total if mode == "sum" else total / (labels != ignore_index).sum()


@without_second_derivatives
class _CrossEntropy(torch.autograd.Function):
    """The sum over tokens of ``log Σ_v exp(logit_v) − logit_target``."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        rows: VocabularyRows,
        ignore_index: int,
        group: dist.ProcessGroup | None,
        clock: Clock | None,
    ) -> Tensor:
        def reduce(tensor: Tensor, operation: Any) -> Tensor:
            if clock is not None:
                clock.mark("other")
            dist.all_reduce(tensor, op=operation, group=group)
            if clock is not None:
                clock.mark("communication")
            return tensor

        assert logits.shape == (*target.shape, len(rows.numbers)), f"{logits.shape} logits of {target.shape} tokens"
        is_used = target != ignore_index
        shifted = logits.float().masked_fill(rows.are_padding, -torch.inf)
        shifted -= reduce(shifted.amax(-1).to(logits.dtype), dist.ReduceOp.MAX).unsqueeze(-1)
        columns = rows.columns_of(target)
        is_here = (columns >= 0) & is_used
        columns = columns.clamp_(min=0)
        of_target = shifted.gather(-1, columns.unsqueeze(-1)).squeeze(-1).where(is_here, 0.0)
        of_target = reduce(of_target.to(logits.dtype), dist.ReduceOp.SUM)
        probabilities = shifted.exp_()
        exponentials = reduce(probabilities.sum(-1), dist.ReduceOp.SUM)
        probabilities *= (is_used / exponentials).unsqueeze(-1)
        probabilities.scatter_add_(-1, columns.unsqueeze(-1), -is_here.to(probabilities.dtype).unsqueeze(-1))
        ctx.save_for_backward(probabilities.to(logits.dtype))
        return (exponentials.log() - of_target).where(is_used, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (of_logits,) = ctx.saved_tensors
        return of_logits * gradient.to(of_logits.dtype), None, None, None, None, None
