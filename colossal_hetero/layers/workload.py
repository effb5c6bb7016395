"""What a parallel linear layer can be told: the small interface between those who decide and the layers.

A layer knows nothing of ranks that are slow or of who decides. It is handed a :class:`Workload`, picks the columns
that stay with the workload's :data:`Selector`, and reports the time of its parts through a :class:`Clock`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

__all__ = [
    "IMPUTATIONS",
    "Clock",
    "Imputation",
    "Lineage",
    "Part",
    "Selector",
    "Slowdown",
    "Workload",
    "impute",
    "kept_count",
]

Imputation = Literal["zero", "average", "same"]
IMPUTATIONS: tuple[str, ...] = get_args(Imputation)

Part = Literal["matmul", "block", "communication", "other"]
"""What a stretch of an iteration was spent on: products of the parallel linear layers (with what resizing adds to
them), what lies between the products of a block (activation functions, attention), the inside of a collective, or any
other work of the rank."""

Selector = Callable[[Tensor, Tensor, int], Tensor]
"""``select(x, weight, count) -> kept``: which ``count`` contraction columns stay.

``x`` is ``[M, L]``, ``weight`` ``[N, L]`` (a view, whatever the layer's own layout), ``kept`` an int64 tensor
``[count]`` in ascending order on the same device. Called without gradients, once per layer and iteration.
"""

GRAIN = 16
"""Contraction columns that matrix products like to have a multiple of: a cache line of float32."""

Slowdown = Callable[[Callable[[], Tensor]], Tensor]
"""``slow_down(product) -> result``: runs a product slower than it is, for experiments."""


class Clock(Protocol):
    """Receives a mark at the end of each part of an iteration."""

    def mark(self, part: Part) -> None:
        """All that happened since the previous mark was ``part``."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A layer's part of the plan on this rank."""

    prune: float
    """Pruning ratio γ of this layer: the share of its contraction columns left out, in [0, 1)."""

    select: Selector
    """Chooses the columns that stay."""

    imputation: Imputation = "zero"
    """What stands in the gradients at pruned columns: ``zero``, the ``average`` of the kept columns, or the value
    that the ``same`` column had in the previous iteration (keeps a copy of both gradients)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.prune < 1.0:
            raise ValueError(
                f"pruning ratio {self.prune} is outside [0, 1): a layer keeps at least some of its columns"
            )
        if self.imputation not in IMPUTATIONS:
            raise ValueError(f"unknown imputation {self.imputation!r}; valid are {', '.join(IMPUTATIONS)}")

    def kept_count(self, columns: int) -> int:
        """How many of ``columns`` contraction columns stay; see :func:`kept_count`."""
        return kept_count(columns, self.prune)


def kept_count(columns: int, prune: float) -> int:
    """How many of ``columns`` contraction columns, or units, stay when ``prune`` of them go; never fewer than one.

    In layers wide enough not to notice, a multiple of :data:`GRAIN`: a product over 205 columns takes a CPU longer than
    one over 208.
    """
    kept = columns - round(prune * columns)
    if columns >= 32 * GRAIN and prune > 0:
        kept = GRAIN * round(kept / GRAIN)
    return max(1, kept)


class Lineage:
    """Which columns one layer pruned in the current iteration, and what imputation needs to know of earlier ones.

    The paper's tuple ⟨layer, matrix, P⟩ (SEMI, Sec. III-A): the layer owns the object, both of its matrices share
    the columns, and ``kept`` is the complement of P. Micro-batches, and forwards recomputed by activation
    checkpointing, of one iteration all use the same object and so the same columns.
    """

    def __init__(self, kept: Tensor, imputation: Imputation, previous: dict[tuple[str, int], Tensor]) -> None:
        self.kept = kept
        self._imputation = imputation
        self._previous = previous
        self._backward_passes = 0

    def begin_backward(self) -> int:
        """The number of this backward pass within the iteration (one per micro-batch)."""
        self._backward_passes += 1
        return self._backward_passes

    def restore(self, matrix: str, backward_pass: int, part: Tensor, dim: int, columns: int) -> Tensor:
        """The gradient of ``matrix`` at full size, ``columns`` along ``dim``, from its kept ``part``."""
        if self._imputation != "same":
            return impute(part, self.kept, dim, columns, self._imputation)
        key = (matrix, backward_pass)
        full = impute(part, self.kept, dim, columns, "same", self._previous.get(key))
        # A copy: the gradient itself is summed over the group, accumulated and scaled in place by others.
        self._previous[key] = full.clone()
        return full


def impute(
    part: Tensor, kept: Tensor, dim: int, columns: int, imputation: Imputation, previous: Tensor | None = None
) -> Tensor:
    """Spread ``part``, the gradient at the ``kept`` columns along ``dim``, over all ``columns`` (SEMI, Sec. III-A).

    ``same`` takes the missing columns from ``previous``, a full gradient, and zeros where there is none of that shape
    (the first iteration, or a last batch of another size).
    """
    dim = dim % part.dim()
    shape = [*part.shape[:dim], columns, *part.shape[dim + 1 :]]
    if imputation == "average":
        full = part.mean(dim, keepdim=True).expand(shape).contiguous()
    elif imputation == "same" and previous is not None and list(previous.shape) == shape:
        full = previous.clone()
    else:
        full = part.new_zeros(shape)
    index_shape = [1] * part.dim()
    index_shape[dim] = -1
    return full.scatter_(dim, kept.view(index_shape).expand(part.shape), part)


def matrix_view(x: Tensor) -> Tensor:
    """``x [..., L]`` as ``[M, L]``."""
    return x.reshape(-1, x.shape[-1])


def is_recorded() -> bool:
    """Whether the running forward pass is one whose gradients will be asked for.

    Without gradients that is the case only inside reentrant activation checkpointing, which runs a segment without
    them first and again with them in the backward pass; both runs must use the same columns.
    """
    return torch.is_grad_enabled() or _inside_checkpointed_forward()


def _inside_checkpointed_forward() -> bool:
    import sys

    from torch.utils.checkpoint import CheckpointFunction

    segment = CheckpointFunction.forward.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is segment:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
