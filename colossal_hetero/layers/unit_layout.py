"""Layouts of weights, places of a block's units in them, and the products of the units that a rank computes. A unit is
a set of rows of a column-parallel weight ``[N, K]``, with their bias, and of columns of the following row-parallel one.
A rank multiplies by the weights of units where they are, and writes the products next to each other or adds them, so
that neither weights nor gradients are copied."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from colossalai.shardformer.layer import _operation
from torch import Tensor

from .workload import matrix_view

# Weights -------------------------------------------------------------------------------------------------------------

FUSED_KERNELS = {torch.float32: "wgrad_gemm_accum_fp32", torch.float16: "wgrad_gemm_accum_fp16"}
"""Functions of apex that add ``dyᵀ · x`` to a gradient of that type."""


class WeightLayout:
    """Storage of a weight; this class: ``[N, L]``, as in ``torch.nn.Linear``."""

    columns = 1  # the dimension of the weight that the product contracts

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        return dy.matmul(weight)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return dy.t().matmul(x)

    def add_weight_gradient(self, dy: Tensor, x: Tensor, grad: Tensor) -> bool:
        """Add dW to ``grad`` in apex's fused kernel, as Colossal-AI's layers do; False if it is missing."""
        if not _operation._grad_accum_fusion_available or grad.dtype not in FUSED_KERNELS:
            return False
        getattr(_operation.fused_weight_gradient_mlp_cuda, FUSED_KERNELS[grad.dtype])(x, dy, grad)
        return True

    def as_matrix(self, weight: Tensor) -> Tensor:
        return weight

    def from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix


class Conv1DLayout(WeightLayout):
    """The layout of GPT-2's ``Conv1D`` in ``transformers``: ``[L, N]``."""

    columns = 0

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.matmul(x, weight)
        return y if bias is None else y + bias

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        return dy.matmul(weight.t())

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return x.t().matmul(dy)

    def add_weight_gradient(self, dy: Tensor, x: Tensor, grad: Tensor) -> bool:
        return False  # The kernel adds a gradient [N, L].

    def as_matrix(self, weight: Tensor) -> Tensor:
        return weight.t()

    def from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.t().contiguous()


LINEAR_LAYOUT = WeightLayout()
CONV1D_LAYOUT = Conv1DLayout()


# Units ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitPlace:
    """Units in a tensor: its ``dim`` has ``parts`` (3 for fused q, k, v), each of ``units`` units of ``size``."""

    dim: int
    parts: int
    units: int
    size: int

    def view(self, tensor: Tensor) -> Tensor:
        """``tensor`` with ``dim`` unfolded into ``(parts, units, size)``."""
        return tensor.unflatten(self.dim, (self.parts, -1, self.size))

    def fold(self, view: Tensor) -> Tensor:
        return view.flatten(self.dim, self.dim + 2)

    @property
    def unit_dim(self) -> int:
        return self.dim + 1

    def numel(self, tensor: Tensor) -> int:
        return tensor.numel() // self.units


class UnitRange(NamedTuple):
    """The units ``[start, stop)`` of the rank ``owner``."""

    owner: int
    start: int
    stop: int


class _Slice(NamedTuple):
    """Units that are adjacent both in activations and in the tensor that holds their weights."""

    activations: slice
    source: int  # 0: the rank's own tensor; n: that of the n-th range of taken units
    first: int
    length: int

    def of(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        return tensors[self.source].narrow(dim, self.first, self.length)


class UnitShare:
    """Units that one rank computes in one layer of a block while units are pruned or migrated. In activations the
    rank's own units come first, and then the taken ones, in each fused part."""

    def __init__(
        self,
        places: Sequence[UnitPlace],
        remaining: int,
        return_gradients: Callable[[list[Tensor]], Sequence[Sequence[Tensor]]],
    ) -> None:
        self._places = places
        self._remaining = remaining
        self._return_gradients = return_gradients
        self.own_outputs: Callable[[Tensor], Tensor] | None = None
        """Makes a second output of the product from X: ``[..., n]``, that of the first ``n`` of the rank's own rows."""
        self._kept: Tensor | None = None
        self._shapes: list[torch.Size] = []
        self._selected: list[Tensor] | None = None
        self._ranges: list[list[Tensor]] = []
        self._messages: list[Tensor] = []

    def begin(self, parameters: Sequence[Tensor], kept: Tensor | None, taken: Sequence[Sequence[Tensor]]) -> None:
        self._kept = kept
        self._shapes = [parameter.shape for parameter in parameters]
        self._selected = None
        if kept is not None:
            self._selected = [
                place.fold(place.view(parameter).index_select(place.unit_dim, kept))
                for place, parameter in zip(self._places, parameters, strict=True)
            ]
        self._ranges = [[place.fold(view) for place, view in zip(self._places, views, strict=True)] for views in taken]

    def release(self) -> None:
        """Forget the weights of :meth:`begin`; backward passes keep what they need."""
        self._selected, self._ranges = None, []

    @property
    def weights(self) -> list[Tensor]:
        """Numbers and weights of the kept units, if such were selected, and the weights of the taken units."""
        kept = [] if self._kept is None else [self._kept, *(self._selected or ())]
        return [*kept, *chain(*self._ranges)]

    def with_weights(self, weights: Sequence[Tensor]) -> UnitShare:
        """Copy with the :attr:`weights` of an earlier forward pass."""
        size, share = len(self._shapes), copy.copy(self)
        if self._kept is not None:
            share._kept, *weights = weights
        parts = [list(weights[first : first + size]) for first in range(0, len(weights), size)]
        share._selected = parts.pop(0) if self._kept is not None else None
        share._ranges = parts
        return share

    def output(self, layout: WeightLayout, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``Y [..., N]`` of the units, from ``x [..., L]``; N or L is the number of their rows or columns."""
        rows, weights, dim = matrix_view(x), self._sources(0, weight), self._places[0].dim
        if dim == layout.columns:
            y = _sum(
                (rows[:, part.activations], layout.as_matrix(part.of(weights, dim)).t()) for part in self._slices()
            )
        else:
            y = rows.new_empty(len(rows), self._width())
            biases = None if bias is None else self._sources(1, bias)
            for part in self._slices():
                matrix = layout.as_matrix(part.of(weights, dim)).t()
                if biases is None:
                    torch.mm(rows, matrix, out=y[:, part.activations])
                else:
                    torch.addmm(part.of(biases, 0), rows, matrix, out=y[:, part.activations])
        # As torch's own product does, so that what follows may change the output in place.
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])

    def input_gradient(self, layout: WeightLayout, dy: Tensor, weight: Tensor) -> Tensor:
        """``dX [..., L]`` of the units, from ``dy [..., N]``."""
        rows, weights, dim = matrix_view(dy), self._sources(0, weight), self._places[0].dim
        if dim == layout.columns:
            dx = rows.new_empty(len(rows), self._width())
            for part in self._slices():
                torch.mm(rows, layout.as_matrix(part.of(weights, dim)), out=dx[:, part.activations])
        else:
            dx = _sum((rows[:, part.activations], layout.as_matrix(part.of(weights, dim))) for part in self._slices())
        return dx.view(*dy.shape[:-1], dx.shape[-1])

    def weight_gradient(self, layout: WeightLayout, dy: Tensor, x: Tensor) -> Tensor:
        """Gradient of the layer's whole weight, from ``dy [M, N]`` and ``x [M, L]``: zero for pruned units, unset for
        given ones (see :meth:`gradients`). The taken units' gradients are written into messages to their owners."""
        dim = self._places[0].dim
        factors = (dy, x) if layout.columns == 1 else (x, dy)
        whole = dy.new_empty(self._shapes[0])
        own = whole if self._selected is None else torch.empty_like(self._selected[0])
        self._messages = [dy.new_empty(sum(tensor.numel() for tensor in units)) for units in self._ranges]
        targets = [own, *self._message_parts(0)]
        for part in self._slices():
            left, right = (
                factor[:, part.activations] if number == dim else factor for number, factor in enumerate(factors)
            )
            torch.mm(left.t(), right, out=part.of(targets, dim))
        return self._expanded(0, own)

    def gradients(self, dw: Tensor, db: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Complete the gradients of the layer's whole weight, ``dw`` of :meth:`weight_gradient`, and bias, and return
        those of the taken units. ``db`` is that of the computed units."""
        whole = [dw]
        if db is not None:
            own = db.new_empty(self._shapes[1] if self._selected is None else self._selected[1].shape)
            targets = [own, *self._message_parts(1)]
            for part in self._slices():
                part.of(targets, 0).copy_(db[part.activations])
            whole.append(self._expanded(1, own))
        messages, self._messages = self._messages, []
        returned = self._return_gradients(messages)
        for number, (place, gradient) in enumerate(zip(self._places, whole, strict=False)):
            given = place.view(gradient).narrow(place.unit_dim, self._remaining, place.units - self._remaining)
            start = 0
            for units in returned:
                count = units[number].shape[place.unit_dim]
                given.narrow(place.unit_dim, start, count).copy_(units[number])
                start += count
        return whole[0], whole[1] if len(whole) > 1 else None

    def _counts(self) -> list[int]:
        place = self._places[0]
        taken = [units[0].shape[place.dim] // (place.parts * place.size) for units in self._ranges]
        return [self._remaining if self._kept is None else len(self._kept), *taken]

    def _width(self) -> int:
        return self._places[0].parts * self._places[0].size * sum(self._counts())

    def _slices(self) -> Iterator[_Slice]:
        place, counts = self._places[0], self._counts()
        # The first tensor is the whole parameter, unless kept units were selected from it.
        in_source = [place.units if self._selected is None else counts[0], *counts[1:]]
        start = 0
        for part in range(place.parts):
            for source, (count, units) in enumerate(zip(counts, in_source, strict=True)):
                length = count * place.size
                yield _Slice(slice(start, start + length), source, part * units * place.size, length)
                start += length

    def _sources(self, number: int, parameter: Tensor) -> list[Tensor]:
        own = parameter if self._selected is None else self._selected[number]
        return [own, *(units[number] for units in self._ranges)]

    def _message_parts(self, number: int) -> list[Tensor]:
        parts = []
        for message, units in zip(self._messages, self._ranges, strict=True):
            first = sum(tensor.numel() for tensor in units[:number])
            parts.append(message[first : first + units[number].numel()].view(units[number].shape))
        return parts

    def _expanded(self, number: int, own: Tensor) -> Tensor:
        if self._kept is None:
            return own
        place = self._places[number]
        whole = own.new_zeros(self._shapes[number])
        place.view(whole).index_copy_(place.unit_dim, self._kept, place.view(own))
        return whole


def _sum(factors: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    total: Tensor | None = None
    for left, right in factors:
        total = left.mm(right) if total is None else total.addmm_(left, right)
    assert total is not None, "a rank computes some units"
    return total


def split_message(
    message: Tensor, places: Sequence[UnitPlace], tensors: Sequence[Tensor], count: int
) -> tuple[list[Tensor], int]:
    """The first elements of ``message`` as ``count`` units of each of ``tensors``, and the number of these elements."""
    views, offset = [], 0
    for place, tensor in zip(places, tensors, strict=True):
        shape = list(place.view(tensor).shape)
        shape[place.unit_dim] = count
        length = count * place.numel(tensor)
        views.append(message[offset : offset + length].view(shape))
        offset += length
    return views, offset
