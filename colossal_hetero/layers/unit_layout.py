"""Where a block's units are in its layers' weights, and which of them a rank computes.

A *unit* of a block is a hidden neuron, a head, or a key/value group with its query heads. In a column-parallel layer
it is a set of rows of the weight ``[N, K]`` (with their bias), in the following row-parallel layer a set of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["UnitPlace", "UnitShare"]


@dataclass(frozen=True)
class UnitPlace:
    """Where a tensor holds units: ``dim`` has ``parts`` (3 for fused q, k, v), each of ``units`` units of ``size``."""

    dim: int
    parts: int
    units: int
    size: int

    def view(self, tensor: Tensor) -> Tensor:
        """``tensor`` with ``dim`` unfolded into ``(parts, units, size)``."""
        return tensor.unflatten(self.dim, (self.parts, -1, self.size))

    def fold(self, view: Tensor) -> Tensor:
        """The reverse of :meth:`view`, for any number of units."""
        return view.flatten(self.dim, self.dim + 2)

    @property
    def unit_dim(self) -> int:
        """The dimension of a :meth:`view` along which units are counted."""
        return self.dim + 1

    def numel(self, tensor: Tensor) -> int:
        """The number of elements of one unit in ``tensor``."""
        return tensor.numel() // self.units


class UnitShare:
    """The units that one rank computes in one layer of a block while units are pruned or migrated.

    Args:
        places: where the units are in the weight and, if there is one, in the bias.
        remaining: how many of the rank's own units are not given away: the first ones.
        taken: how many units of other ranks the rank computes.
        return_gradients: called in the backward pass with the gradients ``[weight, bias]`` of the taken units, as
            views; returns those of the given units, also as views, or None while they are still being accumulated.
    """

    def __init__(
        self,
        places: Sequence[UnitPlace],
        remaining: int,
        taken: int,
        return_gradients: Callable[[list[Tensor]], list[Tensor] | None],
    ) -> None:
        self._places = places
        self._remaining = remaining
        self._taken = taken
        self._return_gradients = return_gradients
        self._kept: Tensor | None = None
        self._operands: list[Tensor] | None = None
        self._buffers: list[Tensor] = []

    def reserve(self, parameters: Sequence[Tensor]) -> None:
        """Allocate the memory for weights with taken units, which this share keeps."""
        if self._taken == 0:
            return
        for place, parameter in zip(self._places, parameters, strict=True):
            shape = list(place.view(parameter).shape)
            shape[place.unit_dim] = self._remaining + self._taken
            self._buffers.append(parameter.new_empty(shape))

    def begin(self, parameters: Sequence[Tensor], kept: Tensor | None, taken: Sequence[Tensor]) -> None:
        """Assemble the weight (and bias) of an iteration.

        Args:
            parameters: the layer's weight and bias, detached.
            kept: which of the remaining units are not pruned, ascending, or None for all of them.
            taken: views of the taken units' weights (and biases), as in ``parameters``.
        """
        self._kept = kept
        self._operands = []
        for number, (place, parameter) in enumerate(zip(self._places, parameters, strict=True)):
            view = place.view(parameter)
            dim = place.unit_dim
            own = view.narrow(dim, 0, self._remaining) if kept is None else view.index_select(dim, kept)
            if self._taken:
                buffer = self._buffers[number]
                if own.shape[dim] + self._taken != buffer.shape[dim]:
                    buffer = buffer.narrow(dim, 0, own.shape[dim] + self._taken)
                buffer.narrow(dim, 0, own.shape[dim]).copy_(own)
                buffer.narrow(dim, own.shape[dim], self._taken).copy_(taken[number])
                own = buffer
            self._operands.append(place.fold(own))

    def operands(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The weight and bias to multiply by instead of the layer's own."""
        assert self._operands is not None, "an iteration has begun"
        return self._operands[0], None if bias is None else self._operands[1]

    def gradients(self, dw: Tensor, db: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The gradients of the layer's whole weight and bias, from those of :meth:`operands`.

        They are zero for pruned units, and for given units while their gradients are still being accumulated.
        """
        views = [place.view(part) for place, part in zip(self._places, (dw, db), strict=False) if part is not None]
        kept = self._remaining if self._kept is None else len(self._kept)
        taken = [
            view.narrow(place.unit_dim, kept, self._taken) for place, view in zip(self._places, views, strict=False)
        ]
        returned = self._return_gradients(taken)
        if kept == self._places[0].units:
            # The rank computes all of its own units: the case of receivers.
            whole = [
                place.fold(view.narrow(place.unit_dim, 0, kept))
                for place, view in zip(self._places, views, strict=False)
            ]
        else:
            whole = []
            for number, (place, view) in enumerate(zip(self._places, views, strict=False)):
                dim = place.unit_dim
                full = view.new_zeros([*view.shape[:dim], place.units, *view.shape[dim + 1 :]])
                own = view.narrow(dim, 0, kept)
                if self._kept is None:
                    full.narrow(dim, 0, kept).copy_(own)
                else:
                    full.index_copy_(dim, self._kept, own)
                if returned is not None:
                    full.narrow(dim, self._remaining, place.units - self._remaining).copy_(returned[number])
                whole.append(place.fold(full))
        return whole[0], whole[1] if len(whole) > 1 else None
