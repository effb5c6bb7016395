"""Tensors that know which micro-batch they come from.

A training loop may change a batch before it trains with it: copy it to a device in a stream of its own, normalize or
mix images, take one batch ahead. A tensor of a loader therefore carries its micro-batch, and so does every tensor that
is computed from it outside the model, such as the loss if it is computed from the labels. Inside the model tensors are
plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .progress import MicroBatch

__all__ = ["TaggedTensor", "micro_batches_of", "shapes_of", "share_of_samples", "tagged", "untagged"]


class TaggedTensor(Tensor):
    """A tensor that was computed from batches of a loader. It behaves like a plain one, and is saved as a plain one."""

    micro_batches: tuple[MicroBatch, ...] = ()
    """The micro-batches that it was computed from; more than one if batches were joined."""

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
    """``batch`` with tensors that know ``micro_batch``. Mappings and data classes that torch does not know are changed
    in place; of other objects nothing is changed."""

    def tag(value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
            value = value.as_subclass(TaggedTensor)
            value.micro_batches = (micro_batch,)
        return value

    return _map(tag, batch)


def untagged(values: Any) -> Any:
    """``values`` with plain tensors; see :func:`tagged`."""

    def plain(value: Any) -> Any:
        return value.as_subclass(Tensor) if isinstance(value, TaggedTensor) else value

    return _map(plain, values)


def micro_batches_of(values: Any) -> tuple[MicroBatch, ...]:
    """The micro-batches that the tensors in ``values`` were computed from, each once; none if they are unknown."""
    return _distinct(list(_leaves(values)))


def shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors in a batch."""
    return tuple(tuple(leaf.shape) for leaf in _leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())


def share_of_samples(micro_batch: MicroBatch, values: Any) -> float:
    """The share of the samples of a micro-batch that ``values`` hold, computed from it.

    It is 1 if that is not known: only tensors that have the shape of one of its tensors, but for the number of samples,
    are looked at.
    """
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
