"""Shard a model over all ranks and compare it with the model it was made from."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from colossalai.shardformer import ShardConfig, ShardFormer
from colossalai.shardformer.policies.auto_policy import get_autopolicy
from colossalai.shardformer.policies.base_policy import Policy
from colossalai.tensor.d_tensor import (
    distribute_tensor,
    get_device_mesh,
    get_sharding_spec,
    is_customized_distributed_tensor,
    is_distributed_tensor,
)
from torch import nn

from colossal_hetero.layers import hetero_policy
from colossal_hetero.layers.policy import HETERO_LAYERS

LossOf = Callable[[nn.Module], torch.Tensor]

Prepare = Callable[[nn.Module], Callable[[], None] | None]
"""Changes a sharded model before it runs; returns what to call before its gradients are compared, or None."""


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give all parameters, also biases and norms, random values with which no gradient is too small to compare."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Weights of norms stay near 1; otherwise activations vanish in deep models.
            parameter.copy_(1 + 0.1 * noise if (parameter == 1).all() else 0.1 * noise)
    return model


def shard(model: nn.Module, policy: Policy | None = None, **options: Any) -> nn.Module:
    """Shard ``model`` over all ranks with ``policy``, by default that of its family with this package's layers, and
    with ``options`` of ``ShardConfig``."""
    # Colossal-AI sums losses over the sequence-parallel group even if it is not used. So the group has only this rank.
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    config = ShardConfig(
        tensor_parallel_process_group=dist.group.WORLD, sequence_parallel_process_group=alone, **options
    )
    return ShardFormer(config).optimize(model, policy or hetero_policy(model))[0]


def own_share(parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``whole``, a tensor with the layout of the unsharded ``parameter``."""
    if is_customized_distributed_tensor(parameter):
        return parameter.shard_fn(whole)
    if is_distributed_tensor(parameter):
        return distribute_tensor(whole.clone(), get_device_mesh(parameter), get_sharding_spec(parameter))
    return whole


def parallel_layer_counts(model: nn.Module) -> dict[str, int]:
    names = [kind.__name__ for kind in (*HETERO_LAYERS, *HETERO_LAYERS.values())]
    counts = Counter(type(module).__name__ for module in model.modules())
    return {name: counts[name] for name in names if counts[name]}


def _leave(sharded: nn.Module) -> None:
    """Change nothing."""


def assert_same_as_unsharded(
    model: nn.Module, loss_of: LossOf, prepare: Iterable[Prepare] = (_leave,), **options: Any
) -> nn.Module:
    """Assert that loss and gradients of the sharded ``model``, which is returned, are those of an unsharded copy.
    ``loss_of`` runs a model on the same inputs each time. The functions in ``prepare`` are called one after the other
    on the same sharded model, which runs once after each of them. ``options`` are those of ``ShardConfig``."""
    expected, gradients = _loss_and_gradients(copy.deepcopy(model), loss_of)
    sharded = shard(model, **options)
    shares = {
        name: own_share(parameter, gradients[name])
        for name, parameter in sharded.named_parameters()
        if gradients[name] is not None
    }
    _assert_loss_and_gradients(sharded, loss_of, prepare, expected, shares)
    return sharded


def assert_same_as_colossalai(
    model: nn.Module, loss_of: LossOf, prepare: Iterable[Prepare] = (_leave,), **options: Any
) -> nn.Module:
    """Assert that ``model`` has the same loss and gradients with this package's layers as with Colossal-AI's, which
    does not sum gradients of relative positions over the ranks; all heads of SAM share them."""
    theirs = copy.deepcopy(model)
    expected, gradients = _loss_and_gradients(shard(theirs, get_autopolicy(theirs), **options), loss_of)
    for name, gradient in gradients.items():
        if "rel_pos" in name and gradient is not None:
            dist.all_reduce(gradient)
    ours = shard(model, **options)
    _assert_loss_and_gradients(ours, loss_of, prepare, expected, gradients)
    return ours


def _loss_and_gradients(model: nn.Module, loss_of: LossOf) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def _assert_loss_and_gradients(
    model: nn.Module,
    loss_of: LossOf,
    prepare: Iterable[Prepare],
    expected: torch.Tensor,
    gradients: dict[str, torch.Tensor | None],
) -> None:
    """After each of ``prepare``, assert ``model``'s loss and, for each parameter, the gradient that this rank holds."""
    for number, change in enumerate(prepare):
        after = change(model)
        model.zero_grad()
        loss, own = _loss_and_gradients(model, loss_of)
        if after is not None:
            after()
            own = {name: parameter.grad for name, parameter in model.named_parameters()}
        what = f"run {number}: "
        close = partial(torch.testing.assert_close, rtol=2e-4, atol=2e-5)
        close(loss, expected, msg=lambda text, what=what: f"{what}loss: {text}")
        assert any(gradient is not None for gradient in own.values()), f"{what}no parameter has a gradient"
        for name, gradient in own.items():
            wanted = gradients.get(name)
            assert (gradient is None) == (wanted is None), f"{what}only one of the models has a gradient of {name}"
            if gradient is not None:
                close(gradient, wanted, msg=lambda text, of=f"{what}gradient of {name}": f"{of}: {text}")
