"""Blocks: a column-parallel layer that feeds a row-parallel one through operations that do not care how wide they are.

MLP, gated MLP, attention with fused or separate q, k and v, with grouped key/value heads or without. A block's *units*
(hidden neurons, heads, key/value groups) can be pruned or computed by another rank without anything else changing: the
block's input and the gradient of its output are on every rank already, and its partial output and partial input
gradient fall into all-reduces that run anyway (ALGORITHMS 1.5).

Which modules hold blocks is data, :data:`RULES`: what lies between two layers cannot be seen in a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from .block_rules import BlockRule, rule_for
from .linear import HeteroLinear
from .unit_layout import UnitPlace, UnitShare
from .workload import Selector, is_recorded

__all__ = ["Block", "BlockWorkload", "attach_blocks"]


@dataclass(frozen=True, kw_only=True)
class BlockWorkload:
    """A block's part of the plan on one rank; counts are of its own local units."""

    given: int = 0
    """How many units it gives away: its last."""
    taken: int = 0
    """How many units of other ranks it computes."""
    kept: int
    """How many units of its own it computes; what is neither kept nor given is pruned."""
    select: Selector | None = None
    """Chooses the kept units where some are pruned, from ``x [b, U]`` and ``weight [a, U]``: the units' columns of the
    row-parallel and rows of the column-parallel weights."""


class Block:
    """A block of one rank's model.

    Args:
        name: of the module that holds it.
        inputs: its column-parallel layers.
        output: its row-parallel layer.
        places: where each layer's weight, and an input's bias, hold the units; in the order inputs, output.
        heads: the module whose ``widths`` follow the number of units, or None.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[HeteroLinear],
        output: HeteroLinear,
        places: Sequence[Sequence[UnitPlace]],
        heads: nn.Module | None,
        widths: Sequence[str],
    ) -> None:
        self.name = name
        self.inputs, self.output = tuple(inputs), output
        self.layers = (*inputs, output)
        self.places = tuple(tuple(of_layer) for of_layer in places)
        self.units = places[-1][0].units
        self.workload: BlockWorkload | None = None
        self._heads = heads
        self._widths = {width: getattr(heads, width) for width in widths if hasattr(heads, width)}
        self._prepare: Callable[[], Sequence[Sequence[Tensor]]] = tuple
        self._shares: tuple[UnitShare, ...] = ()
        self._prepared = False
        for layer in self.layers:
            layer.block = self
        if heads is not None:
            heads.register_forward_pre_hook(self._set_widths)
            heads.register_forward_hook(self._restore_widths, always_call=True)

    @property
    def parameters(self) -> list[list[Tensor]]:
        """What units consist of, without gradient: each layer's weight and each input's bias, as ``places``."""
        return [
            [tensor.detach() for tensor in (layer.weight, layer.bias)[: len(places)]]  # type: ignore[attr-defined]
            for layer, places in zip(self.layers, self.places, strict=True)
        ]

    @property
    def elements_per_unit(self) -> int:
        """What a unit's weights and biases amount to."""
        return sum(
            place.numel(tensor)
            for tensors, places in zip(self.parameters, self.places, strict=True)
            for tensor, place in zip(tensors, places, strict=True)
        )

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """The units' columns of the row-parallel weight ``[b, U]`` and rows of the column-parallel ones ``[a, U]``."""
        columns = [
            place.view(tensors[0]).movedim(place.unit_dim, -1).reshape(-1, self.units)
            for tensors, (place, *_) in zip(self.parameters, self.places, strict=True)
        ]
        return columns[-1], torch.cat(columns[:-1])

    def assign(
        self,
        workload: BlockWorkload | None,
        prepare: Callable[[], Sequence[Sequence[Tensor]]] = tuple,
        hand_over: Callable[[int, list[Tensor]], list[Tensor] | None] = lambda layer, gradients: None,
    ) -> None:
        """Take on ``workload`` from the next iteration on, or, with None, the full share again.

        Args:
            prepare: called once per iteration, before the first product; returns the taken units of every layer.
            hand_over: called in backward with a layer's number and the gradients of its taken units; returns those of
                the given ones, or None while they are still being added up.

        Raises:
            RuntimeError: there is no memory for the units that are taken.
        """
        self.workload = workload
        self._prepare = prepare
        self._shares = ()
        self._prepared = False
        if workload is None:
            return
        self._shares = tuple(
            UnitShare(places, self.units - workload.given, workload.taken, partial(hand_over, number))
            for number, places in enumerate(self.places)
        )
        for share, tensors in zip(self._shares, self.parameters, strict=True):
            share.reserve(tensors)

    def begin_iteration(self) -> None:
        """Weights have changed: ask for the taken ones, and choose units, anew at the next forward."""
        self._prepared = False

    def share_of(self, layer: HeteroLinear) -> UnitShare | None:
        """What ``layer`` computes in the running forward pass; None for its own units."""
        if not self._is_at_work(layer):
            return None
        if not self._prepared:
            self._prepared = True
            taken = self._prepare() or [()] * len(self.layers)
            kept = self._choose()
            for share, tensors, of_layer in zip(self._shares, self.parameters, taken, strict=True):
                share.begin(tensors, kept, of_layer)
        return self._shares[self.layers.index(layer)]

    def _is_at_work(self, layer: Any) -> bool:
        return self.workload is not None and layer.training and is_recorded()

    def _choose(self) -> Tensor | None:
        assert self.workload is not None
        own = self.units - self.workload.given
        if self.workload.kept == own:
            return None
        assert self.workload.select is not None
        x, weight = self.matrices
        return self.workload.select(x[:, :own], weight[:, :own], self.workload.kept)

    def _set_widths(self, module: nn.Module, _: Any) -> None:
        if self._is_at_work(self.output):
            assert self.workload is not None
            units = self.workload.kept + self.workload.taken
            for name, width in self._widths.items():
                setattr(module, name, width // self.units * units)

    def _restore_widths(self, module: nn.Module, *_: Any) -> None:
        for name, width in self._widths.items():
            setattr(module, name, width)


def attach_blocks(model: nn.Module) -> list[Block]:
    """Take hold of the blocks among the tensor-parallel layers of ``model``, in the order of the model; once.

    A layer in none of them can be balanced by its columns only.
    """
    blocks = []
    for name, module in model.named_modules():
        rule = rule_for(type(module))
        if rule is not None and (block := _block(name, module, rule)) is not None:
            blocks.append(block)
    return blocks


def _block(name: str, module: nn.Module, rule: BlockRule) -> Block | None:
    inputs = list(_present(module, rule.inputs))
    outputs = list(_present(module, (rule.output,)))
    if not inputs or not outputs or any(_is_set(found) for found in _present(module, rule.obstacles)):
        return None
    if not all(isinstance(layer, HeteroLinear) and layer.block_obstacle() is None for layer in (*inputs, *outputs)):
        return None
    output = outputs[0]
    heads = None if rule.heads is None else (attrgetter(rule.heads)(module) if rule.heads else module)
    units = output.contraction_columns
    if heads is not None:
        units = next(getattr(heads, count) for count in rule.units if hasattr(heads, count))
    places = []
    for layer in inputs:
        # A gate beside fused parts has a part of its own.
        features = layer.weight.shape[layer.output_dim]
        parts = rule.parts if layer is inputs[0] else 1
        if units == 0 or features % (parts * units):
            return None
        size = features // (parts * units)
        place = UnitPlace(layer.output_dim, parts, units, size)
        places.append([place] if layer.bias is None else [place, UnitPlace(0, parts, units, size)])
    if output.contraction_columns % units:
        return None
    places.append([UnitPlace(1 - output.output_dim, 1, units, output.contraction_columns // units)])
    return Block(name, inputs, output, places, heads, rule.widths)


def _present(module: nn.Module, paths: Sequence[str]) -> Iterator[Any]:
    for path in paths:
        try:
            found = attrgetter(path)(module)
        except AttributeError:
            continue
        if found is not None:
            yield found


def _is_set(found: Any) -> bool:
    return float(getattr(found, "p", 0.0) if isinstance(found, nn.Module) else found) > 0
