"""The gradients of one boosted model: who sums which, what this rank counts of their norm, and the commit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster.plugin import hybrid_parallel_plugin
from torch import Tensor, nn
from torch.nn import Parameter

from ...colossalai_support.accelerator import get_accelerator
from ...common.ranks import of_every_rank
from ..zero.gradient_sums import Finish, GradientBucket, GradientSums, divided

# [Note: commit] Before the optimizer steps, all ranks exchange a message, so that a step happens on all of them or on
# none: the norm of all gradients, if a gradient is not finite, and which parameters got a gradient anywhere. No rank
# steps before it has the sum over the world. So if any rank has stepped, every rank had its complete gradients. If a
# rank does not read the sum, a GPU steps after it, and the host goes on.


@dataclass(frozen=True)
class Commit:
    gradient_norm: float  # of all the model's parameters, as the gradients are: with fp16 multiplied by the loss scale
    overflow: bool  # a gradient of any rank is infinite or not a number
    unused: frozenset[int]  # numbers of parameters that got no gradient on any rank
    words: tuple[float, ...] = ()  # sums of the further numbers that ranks send along


NOTHING = Commit(0.0, False, frozenset())


def exchange(
    squared_norm: Tensor, has_gradient: Sequence[bool], is_read: bool = True, words: Sequence[float] = ()
) -> Commit:
    """Sum up what the ranks tell. Called by all ranks at once."""
    overflow = ~squared_norm.isfinite()
    # Each rank has a place of its own, because the sum must be the same whichever rank computes what.
    squares = squared_norm.new_zeros(dist.get_world_size())
    squares[dist.get_rank()] = squared_norm.where(~overflow, 0.0)
    # From pinned memory, so that the host does not wait for a GPU.
    flags = torch.tensor([*words, *has_gradient], dtype=torch.float64, pin_memory=squares.is_cuda)
    flags = flags.to(squares.device, non_blocking=True)
    message = torch.cat([overflow.double()[None], flags, squares])
    dist.all_reduce(message)
    if not is_read:
        return NOTHING
    overflows, *rest = message.tolist()
    sums, counts = tuple(rest[: len(words)]), rest[len(words) : len(flags)]
    norm = math.inf if overflows else math.sqrt(math.fsum(rest[len(flags) :]))
    return Commit(norm, overflows > 0, frozenset(number for number, count in enumerate(counts) if count == 0), sums)


# Gradients are summed layer by layer, over all ranks that hold the layer (docs/unequal-replicas.md). Sums start in the
# order of the model's parameters, reversed, because backward passes compute gradients in about this order.


@dataclass(frozen=True)
class HeldParameter:
    """A parameter, or a tensor-parallel part of it, as one rank holds it."""

    name: str  # in the model of one process; of tied parameters, the first of their names
    numel: int  # elements that the rank holds
    dtype: str  # of its gradient


@dataclass(frozen=True)
class HolderBucket:
    """Parameters whose gradients are summed in one message, by the same ranks."""

    ranks: tuple[int, ...]  # the holders
    names: tuple[str, ...]  # in the order in which backward passes compute their gradients


def divide_into_buckets(
    order: Sequence[str], held: Mapping[int, Iterable[HeldParameter]], max_elements: int
) -> tuple[HolderBucket, ...]:
    """Buckets of all ranks in the order in which sums start; see [Note: one order of sums]. A bucket ends where the
    next parameter has other holders or another type, or where it would become too large."""
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
    parts = divided(
        [name for name in reversed(order) if name in kinds],
        lambda name: (tuple(holders[name]), kinds[name].dtype),
        lambda name: kinds[name].numel,
        max_elements,
    )
    return tuple(HolderBucket(tuple(holders[names[0]]), tuple(names)) for names in parts)


GroupFinder = Callable[[Iterable[tuple[int, ...]]], Mapping[tuple[int, ...], Any]]
"""Makes process groups of these ranks that do not exist yet, on all ranks in the same order; returns all groups."""


def canonical_names(model: nn.Module) -> dict[str, str]:
    """By name of a parameter in the whole ``model``, in its order: the first name of the same parameter."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


@dataclass(frozen=True)
class SharedParameters:
    numbers: Mapping[int, int]  # by ``id`` of a parameter: its number in the whole model
    total: int  # parameters of the whole model
    buckets: tuple[GradientBucket, ...]  # every parameter is in one


def find_shared_buckets(
    names: Mapping[str, str],
    module: nn.Module,
    trained: Iterable[Parameter],
    tp_group: dist.ProcessGroup,
    max_elements: int,
    find_groups: GroupFinder,
) -> SharedParameters:
    """Buckets of the parameters that this rank trains, with the ranks that share them. Called by all ranks at once."""
    wanted = {id(parameter) for parameter in trained if parameter.requires_grad}
    held: dict[str, Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in wanted:
            held.setdefault(names.get(name, name), parameter)
    own = [HeldParameter(name, each.numel(), str(each.dtype)) for name, each in held.items()]
    everyone = of_every_rank((dist.get_rank(tp_group), own))
    order = list(dict.fromkeys(names.values()))
    places = sorted({place for place, _ in everyone})
    divided = {
        place: divide_into_buckets(
            order, {rank: each for rank, (at, each) in enumerate(everyone) if at == place}, max_elements
        )
        for place in places
    }
    groups = find_groups(sorted({bucket.ranks for buckets in divided.values() for bucket in buckets}))
    own_buckets = tuple(
        GradientBucket(groups[bucket.ranks], tuple(held[name] for name in bucket.names))
        for bucket in divided[dist.get_rank(tp_group)]
        if dist.get_rank() in bucket.ranks
    )
    numbers = {id(held[name]): number for number, name in enumerate(order) if name in held}
    return SharedParameters(numbers, len(order), own_buckets)


NOT_SUMMED = (
    "the plan's replicas are not alike, and these gradients are not summed over the ranks that hold a layer, because "
    "the backward pass ran outside booster.execute_pipeline; replace the forward and backward pass by "
    "booster.execute_pipeline, which also runs replicas without a pipeline"
)


class ReplicaGradients:
    """Sums the gradients of the parameters that this rank holds, and agrees with all ranks on a step."""

    def __init__(
        self,
        parameters: SharedParameters,
        tp_group: dist.ProcessGroup,
        start: Callable[[GradientBucket], Finish],
        sharded: bool,
        early: bool,
    ) -> None:
        self._parameters = [each for bucket in parameters.buckets for each in bucket.parameters]
        self.sums = GradientSums(parameters.buckets, start, watched=self._parameters if early else ())
        self.exchange: Callable[[Tensor, Sequence[bool], bool], Commit] = exchange
        self._numbers, self._total = parameters.numbers, parameters.total
        first_place = dist.get_rank(tp_group) == 0
        self._counted = {
            id(parameter)
            for bucket in parameters.buckets
            if sharded or dist.get_rank(bucket.group) == 0
            for parameter in bucket.parameters
            if first_place or hybrid_parallel_plugin.is_distributed_tensor(parameter)
        }

    def commit(self, gradient_of: Callable[[Parameter], Tensor | None], needs_norm: bool) -> Commit:
        """Agree with all ranks on a step; see [Note: commit]. Called by all ranks at once."""
        if any(each.grad is not None and id(each) not in self.sums.used for each in self._parameters):
            raise RuntimeError(NOT_SUMMED)
        counted = [gradient_of(each) for each in self._parameters if needs_norm and id(each) in self._counted]
        gradients = [each.detach() for each in counted if each is not None]
        if gradients:
            squared = torch.stack(torch._foreach_norm(gradients, 2, torch.float64)).square().sum()
        else:
            squared = torch.zeros((), dtype=torch.float64, device=get_accelerator().get_current_device())
        used = [False] * self._total
        for parameter in self._parameters:
            used[self._numbers[id(parameter)]] = id(parameter) in self.sums.used
        # Without the message, a rank knows that its own parameters are used if it has used them all.
        is_read = needs_norm or any(id(each) not in self.sums.used for each in self._parameters)
        return self.exchange(squared, used, is_read)

    def unused(self, commit: Commit) -> list[Parameter]:
        """Parameters of this rank that got no gradient on any rank."""
        return [each for each in self._parameters if self._numbers[id(each)] in commit.unused]
