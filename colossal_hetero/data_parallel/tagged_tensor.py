"""Tensors that know which micro-batch they come from. A training loop may copy a batch in a stream of its own,
normalize or mix images, or take one ahead. So a loader's tensor carries its micro-batch, as does all that is computed
from it outside the model, such as the loss. Inside the model tensors are plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .progress import MicroBatch


class TaggedTensor(Tensor):
    """A tensor computed from batches of a loader. It behaves like a plain one, and is saved as a plain one."""

    micro_batches: tuple[MicroBatch, ...] = ()  # sources; more than one if batches were joined

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_function__(func, types, args, kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, TaggedTensor)]
        if made:
            sources = _distinct([*tree_leaves(args), *tree_leaves(kwargs)])
            for each in made:
                each.micro_batches = sources
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> TaggedTensor:
        copy = self.as_subclass(Tensor).__deepcopy__(memo).as_subclass(TaggedTensor)
        copy.micro_batches = self.micro_batches
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def tagged(batch: Any, micro_batch: MicroBatch) -> Any:
    """``batch`` with tensors that know ``micro_batch``; mappings and data classes unknown to torch change in place."""

    def tag(value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
            value = value.as_subclass(TaggedTensor)
            value.micro_batches = (micro_batch,)
        return value

    return _map(tag, batch)


def untagged(values: Any) -> Any:
    return _map(lambda value: value.as_subclass(Tensor) if isinstance(value, TaggedTensor) else value, values)


def micro_batches_of(values: Any) -> tuple[MicroBatch, ...]:
    """Distinct micro-batches that the tensors in ``values`` were computed from; none if they are unknown."""
    return _distinct(list(_leaves(values)))


def shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape) for leaf in _leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())


def share_of_samples(micro_batch: MicroBatch, values: Any) -> float:
    """Share of the micro-batch's samples in ``values``, by tensors with the shape of one of its own; 1 if unknown."""
    shares = [0.0]
    for leaf in _leaves(values):
        if isinstance(leaf, TaggedTensor) and leaf.dim():
            whole = [shape[0] for shape in micro_batch.shapes if shape[1:] == tuple(leaf.shape[1:])]
            shares.append(1.0 if not whole else min(len(leaf) / max(whole), 1.0))
    return max(shares) or 1.0


def _distinct(values: list[Any]) -> tuple[MicroBatch, ...]:
    found: dict[int, MicroBatch] = {}
    for value in values:
        if isinstance(value, TaggedTensor):
            found.update((id(each), each) for each in value.micro_batches)
    return tuple(found.values())


def _map(function: Callable[[Any], Any], values: Any) -> Any:
    def apply(leaf: Any) -> Any:
        if isinstance(leaf, MutableMapping):
            for key in leaf:
                leaf[key] = _map(function, leaf[key])
            return leaf
        if _is_changeable(leaf):
            for field in fields(leaf):
                setattr(leaf, field.name, _map(function, getattr(leaf, field.name)))
            return leaf
        return function(leaf)

    return tree_map(apply, values)


def _leaves(values: Any) -> Iterator[Any]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Mapping):
            yield from _leaves(list(leaf.values()))
        elif _is_changeable(leaf):
            yield from _leaves([getattr(leaf, field.name) for field in fields(leaf)])
        else:
            yield leaf


def _is_changeable(leaf: Any) -> bool:
    return is_dataclass(leaf) and not isinstance(leaf, type) and not type(leaf).__dataclass_params__.frozen  # type: ignore[attr-defined]
