"""The gradients of one boosted model: who sums which, what this rank counts of their norm, and the commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster.plugin import hybrid_parallel_plugin
from torch import Tensor, nn
from torch.nn import Parameter

from ...accelerator import get_accelerator
from .commit import Commit, exchange
from .holders import HeldParameter, divide_into_buckets
from .layer_sums import Finish, LayerSums, SharedBucket

__all__ = ["NOT_SUMMED", "GroupFinder", "ReplicaGradients", "canonical_names", "find_shared_buckets"]

GroupFinder = Callable[[Iterable[tuple[int, ...]]], Mapping[tuple[int, ...], Any]]
"""Makes process groups of these ranks that do not exist yet, on all ranks in the same order; returns all groups."""


def canonical_names(model: nn.Module) -> dict[str, str]:
    """By name of a parameter in the whole ``model``, in its order: the first name of the same parameter."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


@dataclass(frozen=True)
class SharedParameters:
    """The parameters that this rank trains."""

    numbers: Mapping[int, int]
    """By ``id`` of a parameter: its number in the whole model."""
    total: int
    """Number of parameters of the whole model."""
    buckets: tuple[SharedBucket, ...]
    """Every parameter is in one."""


def find_shared_buckets(
    names: Mapping[str, str],
    module: nn.Module,
    trained: Iterable[Parameter],
    tp_group: dist.ProcessGroup,
    max_elements: int,
    find_groups: GroupFinder,
) -> SharedParameters:
    """Which parameters this rank shares with whom. Called by all ranks at once.

    Args:
        names: see :func:`canonical_names`; of the model before it was divided.
        module: this rank's part of the model.
        trained: parameters that the optimizer has; others are left out.
        tp_group: this rank's tensor-parallel group.
        max_elements: of a bucket.
        find_groups: makes the groups of ranks that hold the same parameters.

    Raises:
        ValueError: ranks have boosted different models.
    """
    wanted = {id(parameter) for parameter in trained if parameter.requires_grad}
    held: dict[str, Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in wanted:
            held.setdefault(names.get(name, name), parameter)
    own = [HeldParameter(name, each.numel(), str(each.dtype)) for name, each in held.items()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (dist.get_rank(tp_group), own))
    order = list(dict.fromkeys(names.values()))
    places = sorted({place for place, _ in everyone})
    divided = {
        place: divide_into_buckets(
            order, {rank: each for rank, (at, each) in enumerate(everyone) if at == place}, max_elements
        )
        for place in places
    }
    groups = find_groups(sorted({bucket.ranks for buckets in divided.values() for bucket in buckets}))
    rank = dist.get_rank()
    numbers = {name: number for number, name in enumerate(order)}
    return SharedParameters(
        {id(parameter): numbers[name] for name, parameter in held.items()},
        len(order),
        tuple(
            SharedBucket(groups[bucket.ranks], tuple(held[name] for name in bucket.names))
            for bucket in divided[dist.get_rank(tp_group)]
            if rank in bucket.ranks
        ),
    )


def _norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Norm of each tensor, float64; from torch 2.4 on with one kernel for many."""
    if torch.__version__ < (2, 4):  # type: ignore[operator]
        return [torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors]
    return torch._foreach_norm(tensors, 2, torch.float64)


NOT_SUMMED = (
    "the plan's replicas are not alike, and these gradients are not summed over the ranks that hold a layer, because "
    "the backward pass ran outside booster.execute_pipeline; replace the forward and backward pass by "
    "booster.execute_pipeline, which also runs replicas without a pipeline"
)


class ReplicaGradients:
    """Sums the gradients of the parameters that this rank holds, and agrees with all ranks on a step.

    Args:
        parameters: those that this rank trains.
        tp_group: this rank's tensor-parallel group.
        start: starts the sum of a bucket.
        sharded: whether each holder keeps another shard of a sum, as with ZeRO; otherwise all keep the whole sum.
        early: whether sums start during backward passes.
    """

    def __init__(
        self,
        parameters: SharedParameters,
        tp_group: dist.ProcessGroup,
        start: Callable[[SharedBucket], Finish],
        sharded: bool,
        early: bool,
    ) -> None:
        self.sums = LayerSums(parameters.buckets, start, early)
        self.exchange: Callable[[Tensor, Sequence[bool], bool], Commit] = exchange
        """How the ranks agree on a step: :func:`.commit.exchange`."""
        self._parameters = parameters
        first_place = dist.get_rank(tp_group) == 0
        self._counted = {
            id(parameter)
            for bucket in parameters.buckets
            if sharded or dist.get_rank(bucket.group) == 0
            for parameter in bucket.parameters
            if first_place or hybrid_parallel_plugin.is_distributed_tensor(parameter)
        }

    def commit(self, gradient_of: Callable[[Parameter], Tensor | None], needs_norm: bool) -> Commit:
        """Agree with all ranks on a step; see [Note: commit] in ``commit.py``. Called by all ranks at once.

        Args:
            gradient_of: the summed gradient of a parameter, or this rank's shard of it.
            needs_norm: whether norm and overflow are used; otherwise the norm is 0, and a rank that has used all its
                parameters does not wait for the others' answer.

        Raises:
            RuntimeError: there are gradients that were not summed over replicas.
        """
        parameters = [each for bucket in self._parameters.buckets for each in bucket.parameters]
        if any(each.grad is not None and id(each) not in self.sums.used for each in parameters):
            raise RuntimeError(NOT_SUMMED)
        counted = [gradient_of(each) for each in parameters if needs_norm and id(each) in self._counted]
        gradients = [each.detach() for each in counted if each is not None]
        if gradients:
            squared = torch.stack(list(_norms(gradients))).square().sum()
        else:
            squared = torch.zeros((), dtype=torch.float64, device=get_accelerator().get_current_device())
        used = [False] * self._parameters.total
        for parameter in parameters:
            used[self._parameters.numbers[id(parameter)]] = id(parameter) in self.sums.used
        # Without the message, a rank knows that its own parameters are used if it has used them all.
        return self.exchange(squared, used, needs_norm or any(id(each) not in self.sums.used for each in parameters))

    def unused(self, commit: Commit) -> list[Parameter]:
        """Parameters of this rank that got no gradient on any rank."""
        return [
            parameter
            for bucket in self._parameters.buckets
            for parameter in bucket.parameters
            if self._parameters.numbers[id(parameter)] in commit.unused
        ]
