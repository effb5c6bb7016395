"""Blocks: a column-parallel layer that feeds a row-parallel one through operations that work for any width, as in an
MLP or attention. A block's *units* (hidden neurons, heads, key/value groups) can be pruned, or computed by another
rank, without any other change: every rank holds the block's input and the gradient of its output, and all-reduces that
run in any case sum the partial outputs and partial input gradients (docs/algorithms.md, 1.5)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.modules.module as torch_module
from torch import Tensor, nn

from ..colossalai_support.corrections import OWN_PACKAGES, is_from, user_hooks
from .block_rules import BlockRule, rule_for
from .dropout import UnitDropout
from .linear import HeteroLinear
from .unit_layout import UnitPlace, UnitRange, UnitShare
from .workload import Context, Selector, Surrounded, is_recorded, uncompiled, values_of

# Units of a block must not migrate if somebody sees what a rank computes inside of it: a caller who asks for attention
# maps or keys, a hook, a replaced forward pass, or a module of the user's own, which may keep what it sees.

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_MODELS = (*OWN_PACKAGES, "timm", "transformers")
"""Packages whose forward passes keep nothing that they compute, unless they are asked to."""


def is_seen(modules: Iterable[nn.Module]) -> bool:
    """True if somebody sees what passes through any of ``modules``, which are inside of a block."""
    if any(_has_others(getattr(torch_module, f"_global{hooks}").values(), OWN_PACKAGES) for hooks in HOOKS):
        return True
    for module in modules:
        attributes = vars(module)
        for hooks in HOOKS:
            if attributes[hooks] and _has_others(attributes[hooks].values(), OWN_PACKAGES):
                return True
        if "forward" in attributes and _has_others([attributes["forward"]], _MODELS):
            return True
        if _is_users(type(module)) and any(map(_is_computed, attributes.values())):  # type: ignore[arg-type]
            return True
    return False


def asks_for_heads(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """True if the caller takes or gives maps, masks, or in training earlier keys and values, of this rank's heads."""
    asked = arguments.get("output_attentions")
    if asked is None:
        config = getattr(model, "config", None)
        configs = [config, *vars(config).values()] if hasattr(config, "output_attentions") else []
        asked = any(getattr(each, "output_attentions", None) is True for each in configs)
    given = [name for name, value in arguments.items() if value is not None]
    return bool(asked) or any(
        name.endswith("head_mask") or (model.training and name == "past_key_values") for name in given
    )


@cache
def _is_users(kind: type[nn.Module]) -> bool:
    return _has_others([kind.forward], (*_MODELS, "torch"))


def _is_computed(value: Any) -> bool:
    """True if ``value`` is, or has as its newest element, a tensor of the last pass, with a gradient to be computed."""
    if isinstance(value, list) and value:
        value = value[-1]
    return isinstance(value, Tensor) and value.grad_fn is not None


def _has_others(functions: Iterable[Any], packages: tuple[str, ...]) -> bool:
    return not all(is_from(function, packages) for function in functions)


Fetch = Callable[[], Sequence[Sequence[Sequence[Tensor]]]]
"""Returns the taken units: for each range of them and each layer, contiguous views of weight and bias."""
ReturnGradients = Callable[[int, list[Tensor]], Sequence[Sequence[Tensor]]]
"""Takes a layer's index and its taken units' gradients; returns those of its given units (:class:`.UnitShare`)."""


@dataclass(frozen=True, kw_only=True)
class BlockWorkload:
    """A block's part of the plan on one rank; all counts are numbers of units."""

    given: int = 0  # number of own units that the rank gives away: the last ones
    taken: tuple[UnitRange, ...] = ()
    kept: int  # number of own units that the rank computes; units that are neither kept nor given away are pruned
    select: Selector | None = None
    """Chooses the kept units if some are pruned, from ``x [b, U]`` and ``weight [a, U]`` of :attr:`Block.matrices`."""

    def units_of(self, rank: int) -> list[UnitRange]:
        """Units that rank ``rank`` of the group computes, as activations order them; kept units count as the first."""
        return [UnitRange(rank, 0, self.kept), *self.taken]


class Block:
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
        self.kind: int | None = None
        self.workload: BlockWorkload | None = None
        self.held: tuple[UnitRange, ...] | None = None
        """Units that this rank's parameters hold, in their order; None: its own :attr:`units`, as ordinarily."""
        self.before_forward: Callable[[], None] | None = None
        """Called before the first layer's forward pass in training, also without a workload."""
        self.inside: tuple[nn.Module, ...] = self.layers  # type: ignore[assignment]
        """Modules through which only the units pass that this rank computes."""
        self.dropout: Callable[[], Context | None] = lambda: None
        """Returns the context in which the current pass draws dropout by unit; None: it draws as without balancing."""
        self.drops_by_unit = False
        """True from the first plan on that divides units, the same on all ranks: then no later plan changes a mask."""
        self.stays = False
        """True if units stay because somebody sees them (:func:`is_seen`), on whichever rank; the same on all ranks."""
        self.moves: bool | None = True
        """True if units can migrate now, False if never, None if that is not known yet; the same on all ranks."""
        self.reshards = True
        self._heads = heads
        self._widths = {width: getattr(heads, width) for width in widths if hasattr(heads, width)}
        self._fetch: Fetch = tuple
        self._shares: tuple[UnitShare, ...] = ()
        self._prepared = False
        for layer in self.layers:
            layer.block = self

    @property
    def is_hooked(self) -> bool:
        """True if a parameter that holds units has a hook of the user on this rank."""
        return any(any(user_hooks(tensor)) for tensors in self.unit_parameters for tensor in tensors)

    def is_seen(self, asks_for_heads: bool) -> bool:
        return (asks_for_heads and self._heads is not None) or is_seen(self.inside)

    @property
    def unit_parameters(self) -> list[list[Tensor]]:
        """The parameters that hold units, ordered as ``places``: each layer's weight and each input's bias."""
        return [
            list((layer.weight, layer.bias)[: len(places)])  # type: ignore[attr-defined]
            for layer, places in zip(self.layers, self.places, strict=True)
        ]

    @property
    def parameters(self) -> list[list[Tensor]]:
        return [[values_of(tensor) for tensor in tensors] for tensors in self.unit_parameters]

    @property
    def elements_per_unit(self) -> int:
        return sum(
            place.numel(tensor)
            for tensors, places in zip(self.parameters, self.places, strict=True)
            for tensor, place in zip(tensors, places, strict=True)
        )

    @property
    def contraction_columns(self) -> int:
        return self.units

    @property
    def matrix(self) -> Tensor:
        """The weights ``[a, U]`` with one column per unit."""
        return self.matrices[1]

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """Units' columns of the row-parallel weight ``[b, U]`` and rows of the others ``[a, U]``; views if possible."""
        columns = [
            place.view(tensors[0]).movedim(place.unit_dim, -1).reshape(-1, self.units)
            for tensors, (place, *_) in zip(self.parameters, self.places, strict=True)
        ]
        return columns[-1], columns[0] if len(columns) == 2 else torch.cat(columns[:-1])

    def assign(
        self,
        workload: BlockWorkload | None,
        fetch: Fetch = tuple,
        return_gradients: ReturnGradients = lambda layer, gradients: (),
    ) -> None:
        """Compute ``workload`` from the next iteration on; None means the full share of the work."""
        self.workload = workload
        self._fetch = fetch
        self._shares = ()
        self.begin_iteration()
        if workload is not None:
            self._shares = tuple(
                UnitShare(places, self.units - workload.given, partial(return_gradients, number))
                for number, places in enumerate(self.places)
            )
        self._assigned()

    def _assigned(self) -> None:
        """Called after :meth:`assign`, for kinds of blocks that keep more about a workload."""

    def hold(self, held: tuple[UnitRange, ...] | None) -> None:
        """Compute exactly these units, which the parameters hold from now on; None: the rank's own ones."""
        assert self.workload is None, "units migrate only between ordinary shards"
        self.held = held

    def begin_iteration(self) -> None:
        self._has_chosen = False
        self.refresh()

    def refresh(self) -> None:
        """Fetch taken units again in the next forward pass, as weights may have changed; keep the same units."""
        self._prepared = False
        for share in self._shares:
            share.release()

    def share_of(self, layer: HeteroLinear) -> UnitShare | None:
        if not self._is_active(layer):
            return None
        if not self._prepared:
            if is_seen(self.inside):
                raise RuntimeError(
                    f"a hook on a module inside of {self.name} would see other units than those of this rank, because "
                    "a plan divides them and was not told of the hook; call the whole model, not a part of it"
                )
            self._prepared = True
            ranges = self._fetch()
            if not self._has_chosen:
                self._has_chosen, self._kept = True, self._choose()
            for number, (share, tensors) in enumerate(zip(self._shares, self.parameters, strict=True)):
                share.begin(tensors, self._kept, [units[number] for units in ranges])
            if layer.clock is not None:
                layer.clock.mark("block", self.kind)
        return self._shares[self.layers.index(layer)]

    def computed_units(self) -> list[UnitRange]:
        rank = dist.get_rank(self.output.process_group)  # type: ignore[attr-defined]
        if self.held is not None:
            return list(self.held)
        if not self._is_active(self.output):
            return [UnitRange(rank, 0, self.units)]
        assert self.workload is not None
        return self.workload.units_of(rank)

    def _is_active(self, layer: Any) -> bool:
        return self.workload is not None and layer.training and is_recorded()

    def _choose(self) -> Tensor | None:
        assert self.workload is not None
        remaining = self.units - self.workload.given
        if self.workload.kept == remaining:
            return None
        assert self.workload.select is not None
        x, weight = self.matrices
        return self.workload.select(x[:, :remaining], weight[:, :remaining], self.workload.kept)

    @uncompiled
    def context(self) -> Context | None:
        """Return the context of the current forward pass, for attention's widths and dropout inside the block."""
        if self._heads is None or (self.held is None and not self._is_active(self.output)):
            return self.dropout()
        units = sum(stop - start for _, start, stop in self.computed_units())
        return self._with_widths(units, self.dropout() or nullcontext())

    @contextmanager
    @torch.compiler.disable(recursive=False)
    def _with_widths(self, units: int, dropout: Context) -> Iterator[None]:
        vars(self._heads).update({name: width // self.units * units for name, width in self._widths.items()})
        try:
            with dropout:
                yield
        finally:
            vars(self._heads).update(self._widths)


def attach_blocks(model: nn.Module) -> list[Block]:
    """Find the blocks of ``model`` by :data:`.RULES`, connect their layers to them, and return them in model order.
    Call it once per model. If attention is in no block because of its kernel, global rank 0 warns."""
    blocks, left_out = [], []
    holders: dict[Block, nn.Module] = {}
    for name, module in model.named_modules():
        rule = rule_for(type(module))
        if rule is None or not _has_balanced_layers(module, rule):
            continue
        if _has_dropout(module, rule) and _has_unknown_kernel(module, rule):
            left_out.append(name)
        elif (block := _block(name, module, rule)) is not None:
            blocks.append(block)
            holders[block] = module
    for block, holder in holders.items():
        block.inside = tuple(_inside(block, holder, set(holders.values()) - {holder}))
    if left_out and dist.get_rank() == 0:
        warnings.warn(
            f"{len(left_out)} attention modules ({left_out[0]}, …) cannot be balanced by whole heads, because their "
            "kernel draws dropout itself; set their dropout to 0, or use torch's attention (attn_implementation='sdpa' "
            "or 'eager', without enable_flash_attention)",
            stacklevel=2,
        )
    return blocks


def _inside(block: Block, holder: nn.Module, others: set[nn.Module]) -> Iterator[nn.Module]:
    """Modules in ``holder`` but not in ``others``, other blocks; with attention itself, as it may return its maps."""
    if block._heads is not None and type(holder).__module__.startswith("transformers."):
        yield holder
    for child in holder.children():
        if child not in others:
            yield child
            yield from _inside(block, child, others)


def _has_balanced_layers(module: nn.Module, rule: BlockRule) -> bool:
    inputs, outputs = list(_present(module, rule.inputs)), list(_present(module, (rule.output,)))
    if not inputs or not outputs or any(_is_set(found) for found in _present(module, rule.obstacles)):
        return False
    return all(isinstance(layer, HeteroLinear) and layer.block_obstacle() is None for layer in (*inputs, *outputs))


def _heads(module: nn.Module, rule: BlockRule) -> nn.Module | None:
    if rule.heads is None:
        return None
    return attrgetter(rule.heads)(module) if rule.heads else module


def _block(name: str, module: nn.Module, rule: BlockRule) -> Block | None:
    inputs, (output,) = list(_present(module, rule.inputs)), _present(module, (rule.output,))
    heads = _heads(module, rule)
    units = output.contraction_columns
    if heads is not None:
        units = next(getattr(heads, count) for count in rule.units if hasattr(heads, count))
    places = []
    for layer in inputs:
        # A gate next to a fused layer is a layer of its own, with a single part.
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
    block = Block(name, inputs, output, places, heads, rule.widths)
    if rule.dropouts:
        dropout = UnitDropout(name, units, -1 if heads is None else -3, block.computed_units)

        def context() -> Context | None:
            if block.drops_by_unit and module.training and _has_dropout(module, rule):
                return dropout.between(inputs[0], output)
            return None

        block.dropout = context
    if rule.dropouts or heads is not None:
        holder = module if heads is None else heads
        # The compiler cannot compile what the mode for dropout replaces.
        vars(holder)["forward"] = Surrounded(holder, block.context, compiles=not _has_dropout(module, rule))
    return block


def _present(module: nn.Module, paths: Sequence[str]) -> Iterator[Any]:
    for path in paths:
        with suppress(AttributeError):
            if (found := attrgetter(path)(module)) is not None:
                yield found


def _has_dropout(module: nn.Module, rule: BlockRule) -> bool:
    return any(map(_is_set, _present(module, rule.dropouts)))


def _has_unknown_kernel(module: nn.Module, rule: BlockRule) -> bool:
    heads = _heads(module, rule)
    if heads is None:
        return False
    code = getattr(inspect.unwrap(heads.forward), "__code__", None)
    if code is not None and not {"ColoAttention", "RingAttention"}.isdisjoint((*code.co_names, *code.co_freevars)):
        return True
    return getattr(getattr(heads, "config", None), "_attn_implementation", "sdpa") not in ("eager", "sdpa")


def _is_set(found: Any) -> bool:
    return float(getattr(found, "p", 0.0) if isinstance(found, nn.Module) else found) > 0
