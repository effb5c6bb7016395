"""Which ranks hold which parameter, and the buckets in which gradients are summed over them.

In replicas that are not alike, a layer may be in another stage, beside other layers, in each replica. So its gradients
are summed layer by layer, over all ranks that hold it (AutoHet, section III-C: layer-wise gradient synchronization).

[Note: one order of sums] All ranks start sums in the same order: that of the model's parameters, reversed, because
backward passes compute gradients in about this order. A rank starts only the sums that it takes part in. So no rank
waits for a sum that another rank starts later than one that waits for the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["HeldParameter", "HolderBucket", "divide_into_buckets"]


@dataclass(frozen=True)
class HeldParameter:
    """A parameter, or a tensor-parallel part of it, as one rank holds it."""

    name: str
    """In the model of one process; of tied parameters, the first of their names."""
    numel: int
    """Elements that the rank holds."""
    dtype: str
    """Type of its gradient."""


@dataclass(frozen=True)
class HolderBucket:
    """Parameters whose gradients are summed in one message, by the same ranks."""

    ranks: tuple[int, ...]
    """Those that hold the parameters."""
    names: tuple[str, ...]
    """In the order in which backward passes compute their gradients."""


def divide_into_buckets(
    order: Sequence[str], held: Mapping[int, Iterable[HeldParameter]], max_elements: int
) -> tuple[HolderBucket, ...]:
    """The buckets of all ranks, in the order in which sums start; see [Note: one order of sums].

    A bucket ends where the next parameter has other holders or another type, or where it would become too large.

    Args:
        order: names of all parameters, in the order of the model.
        held: by rank, the parameters that it holds, of the ranks with one place in their tensor-parallel groups.
        max_elements: of a bucket, unless it has only one parameter.

    Raises:
        ValueError: ranks hold parts of different sizes or types of a parameter.
    """
    holders: dict[str, list[int]] = {}
    kinds: dict[str, HeldParameter] = {}
    for rank in sorted(held):
        for parameter in held[rank]:
            holders.setdefault(parameter.name, []).append(rank)
            first = kinds.setdefault(parameter.name, parameter)
            if parameter != first:
                raise ValueError(
                    f"rank {rank} holds {parameter.numel} elements of type {parameter.dtype} of {parameter.name}, but "
                    f"rank {holders[parameter.name][0]} {first.numel} of type {first.dtype}; boost the same model on "
                    "all ranks"
                )
    unknown = sorted(holders.keys() - set(order))
    if unknown:
        raise ValueError(f"parameters {', '.join(unknown)} are not in the model that was boosted")
    buckets: list[HolderBucket] = []
    elements, dtype = 0, ""
    for name in reversed(order):
        if name not in kinds:
            continue
        ranks, kind = tuple(holders[name]), kinds[name]
        fits = elements + kind.numel <= max_elements and dtype == kind.dtype
        if buckets and buckets[-1].ranks == ranks and fits:
            buckets[-1] = HolderBucket(ranks, (*buckets[-1].names, name))
            elements += kind.numel
        else:
            buckets.append(HolderBucket(ranks, (name,)))
            elements, dtype = kind.numel, kind.dtype
    return tuple(buckets)
