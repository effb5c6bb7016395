"""Interface between the code that decides and the layers. A layer does not know which ranks are slow: it gets a
:class:`Workload`, chooses the columns to keep with its :data:`Selector`, and reports times to a :class:`Clock`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

Imputation = Literal["zero", "average", "same"]
IMPUTATIONS: tuple[str, ...] = get_args(Imputation)

Part = Literal["matmul", "overlapped", "block", "communication", "migration", "other"]
"""Uses of time. ``matmul``: products of parallel linear layers, with what resizing adds; ``overlapped``: such a product
beside a collective, which may slow it down; ``block``: operations between the products of a block, and copying units
that migrate; ``communication``: inside a collective; ``migration``: waiting for migrated work; ``other``: the rest."""
Selector = Callable[[Tensor, Tensor, int], Tensor]
"""``select(x, weight, count) -> kept``: the ``count`` contraction columns to keep, int64 ``[count]`` in ascending
order, from ``x [M, L]`` and ``weight [N, L]`` (a view, independent of the layer's layout) on the same device. It is
called without gradients, once per layer and iteration."""
Context = AbstractContextManager[object]
GRAIN = 16
"""Matrix products are fastest if the number of contraction columns is a multiple of this: a cache line of float32."""
Slowdown = Callable[[Callable[[], Tensor]], Tensor]
"""``slow_down(product) -> result``: runs ``product`` more slowly and returns its result, for experiments."""


class Clock(Protocol):
    """Receives a mark at the end of each part of an iteration."""

    def mark(self, part: Part, kind: int | None = None, inner: bool = False) -> None:
        """Count the time since the previous mark as ``part``, by a layer of this ``kind`` if one is given. Layers of
        one kind have equally much work and are balanced in the same way. ``inner`` parts may be counted with the next
        one: operations of one block, or a product beside a collective and the rest of that."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A layer's part of the plan on this rank."""

    prune: float  # pruning ratio γ of this layer: the share of its contraction columns left out, in [0, 1)
    select: Selector

    imputation: Imputation = "zero"
    """The gradients' values at pruned columns: ``zero``, the ``average`` of the kept columns, or the value of the
    ``same`` column in the previous iteration (which keeps a copy of both gradients)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.prune < 1.0:
            raise ValueError(f"pruning ratio {self.prune} is outside [0, 1): a layer must keep some of its columns")
        if self.imputation not in IMPUTATIONS:
            raise ValueError(f"unknown imputation {self.imputation!r}; valid are {', '.join(IMPUTATIONS)}")

    def kept_count(self, columns: int) -> int:
        return kept_count(columns, self.prune)


def kept_count(columns: int, prune: float) -> int:
    """Number of ``columns``, or units, that are kept if the share ``prune`` is pruned; at least one. In wide layers it
    is a multiple of :data:`GRAIN`, because a CPU takes longer for a product over 205 columns than for one over 208."""
    kept = columns - round(prune * columns)
    if columns >= 32 * GRAIN and prune > 0:
        kept = GRAIN * round(kept / GRAIN)
    return max(1, kept)


class Lineage:
    """Columns that a layer keeps in the current iteration, and the earlier gradients that imputation needs: the paper's
    tuple ⟨layer, matrix, P⟩ (SEMI, Sec. III-A) with ``kept`` as complement of P. All micro-batches of an iteration, and
    forward passes that activation checkpointing repeats, use the same object."""

    def __init__(self, kept: Tensor, imputation: Imputation, previous: dict[tuple[str, int], Tensor]) -> None:
        self.kept = kept
        self._imputation = imputation
        self._previous = previous
        self._backward_passes = 0

    def begin_backward(self) -> int:
        """Count a backward pass (one per micro-batch) and return its number within the iteration, from 1 on."""
        self._backward_passes += 1
        return self._backward_passes

    def restore(self, matrix: str, backward_pass: int, part: Tensor, dim: int, columns: int) -> Tensor:
        """The gradient of ``matrix`` at full size, ``columns`` along ``dim``, from its kept ``part``."""
        if self._imputation != "same":
            return impute(part, self.kept, dim, columns, self._imputation)
        key = (matrix, backward_pass)
        full = impute(part, self.kept, dim, columns, "same", self._previous.get(key))
        # A copy, because the gradient itself is summed over the group, accumulated and scaled in place.
        self._previous[key] = full.clone()
        return full


def impute(
    part: Tensor, kept: Tensor, dim: int, columns: int, imputation: Imputation, previous: Tensor | None = None
) -> Tensor:
    """Spread ``part``, the gradient at the ``kept`` columns along ``dim``, over all ``columns`` (SEMI, Sec. III-A).
    ``same`` takes the missing columns from ``previous``, or zeros without one of this shape (another batch size)."""
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
    return x.reshape(-1, x.shape[-1])


def values_of(parameter: Tensor) -> Tensor:
    """Detached ``parameter``, without Colossal-AI's layout. Its own ``detach`` copies the layout too, device mesh
    included, which takes fifty times as long (0.13 ms on a CPU), several times per layer and iteration."""
    return Tensor.detach(parameter)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compiler.disable`` for a function that is called in every pass of a layer, without its four microseconds
    while nothing is compiled. The compiler takes ``is_compiling()`` for true."""
    disabled = torch.compiler.disable(function)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return run


def traced(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let calls be ranges ``colossal_hetero.NAME`` while a profiler of torch runs (NVTX in ``emit_nvtx``)."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.autograd._profiler_enabled():  # about 0.2 µs
                return function(*args, **kwargs)
            with torch.autograd.profiler.record_function(f"colossal_hetero.{name}"):
                return function(*args, **kwargs)

        return run

    return decorate


class Surrounded:
    """The forward pass of ``module`` inside ``context()``; as it was if that is None. It replaces a pair of hooks,
    which take more than two microseconds even if they do nothing. If not ``compiles``, torch does not compile it.
    Copies of the module get the forward pass from before."""

    def __init__(self, module: nn.Module, context: Callable[[], Context | None], compiles: bool = True) -> None:
        self.__wrapped__, self._context = module.forward, context
        self._forward = module.forward if compiles else torch.compiler.disable(partial(module.forward))
        self.func = vars(module).get("forward", context)  # as in a partial; `is_from` looks at what it calls

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (context := self._context()) is None:
            return self._forward(*args, **kwargs)
        with context:
            return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.__wrapped__, memo)


def is_recorded() -> bool:
    """True if gradients will be computed for the current forward pass. Reentrant activation checkpointing runs a
    segment without gradients first, and with gradients in the backward pass; both runs must use the same columns."""
    if torch.is_grad_enabled():
        return True
    segment, frame = CheckpointFunction.forward.__code__, sys._getframe(1)
    while frame is not None and frame.f_code is not segment:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
