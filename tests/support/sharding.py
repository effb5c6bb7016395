"""Shard a model over all ranks and compare it with the model it was made from."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
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


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter, biases and norms included, values whose gradients are all of a visible size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms keep a weight near one, or deep models lose their signal.
            parameter.copy_(1 + 0.1 * noise if (parameter == 1).all() else 0.1 * noise)
    return model


def shard(model: nn.Module, policy: Policy | None = None, **options: Any) -> nn.Module:
    """Shard ``model`` over all ranks by ``policy``, by default its own with this package's layers.

    ``options`` are those of ``ShardConfig``.
    """
    # Losses are summed over the sequence-parallel group whether or not it is in use, so it is this rank alone.
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    config = ShardConfig(
        tensor_parallel_process_group=dist.group.WORLD, sequence_parallel_process_group=alone, **options
    )
    return ShardFormer(config).optimize(model, policy or hetero_policy(model))[0]


def own_share(parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of ``whole``, a tensor laid out like the unsharded ``parameter``."""
    if is_customized_distributed_tensor(parameter):
        return parameter.shard_fn(whole)
    if is_distributed_tensor(parameter):
        return distribute_tensor(whole.clone(), get_device_mesh(parameter), get_sharding_spec(parameter))
    return whole


def parallel_layer_counts(model: nn.Module) -> dict[str, int]:
    """Return how many parallel linear layers ``model`` has, Colossal-AI's or this package's, by class name."""
    names = [kind.__name__ for kind in (*HETERO_LAYERS, *HETERO_LAYERS.values())]
    counts = Counter(type(module).__name__ for module in model.modules())
    return {name: counts[name] for name in names if counts[name]}


def assert_same_as_unsharded(
    model: nn.Module, loss_of: LossOf, prepare: Callable[[nn.Module], None] = lambda sharded: None, **options: Any
) -> nn.Module:
    """Assert that loss and gradients of the sharded ``model`` are those of an unsharded copy.

    ``loss_of`` runs a model on the same inputs each time and returns a scalar; ``prepare`` is given the sharded model
    before it runs; ``options`` are those of ``ShardConfig``. Returns the sharded model.
    """
    expected, gradients = _loss_and_gradients(copy.deepcopy(model), loss_of)
    sharded = shard(model, **options)
    shares = {
        name: own_share(parameter, gradients[name])
        for name, parameter in sharded.named_parameters()
        if gradients[name] is not None
    }
    prepare(sharded)
    _assert_loss_and_gradients(sharded, loss_of, expected, shares)
    return sharded


def assert_same_as_colossalai(
    model: nn.Module, loss_of: LossOf, prepare: Callable[[nn.Module], None] = lambda sharded: None, **options: Any
) -> nn.Module:
    """Assert that ``model`` sharded with this package's layers does what it does with Colossal-AI's own."""
    theirs = copy.deepcopy(model)
    expected, gradients = _loss_and_gradients(shard(theirs, get_autopolicy(theirs), **options), loss_of)
    ours = shard(model, **options)
    prepare(ours)
    _assert_loss_and_gradients(ours, loss_of, expected, gradients)
    return ours


def _loss_and_gradients(model: nn.Module, loss_of: LossOf) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def _assert_loss_and_gradients(
    model: nn.Module, loss_of: LossOf, expected: torch.Tensor, gradients: dict[str, torch.Tensor | None]
) -> None:
    """Assert ``model``'s loss and, parameter by parameter, the gradients that this rank holds."""
    loss, own = _loss_and_gradients(model, loss_of)
    close = partial(torch.testing.assert_close, rtol=2e-4, atol=2e-5)
    close(loss, expected, msg=lambda text: f"loss: {text}")
    assert any(gradient is not None for gradient in own.values()), "nothing has a gradient"
    for name, gradient in own.items():
        wanted = gradients.get(name)
        assert (gradient is None) == (wanted is None), f"only one of the models has a gradient of {name}"
        if gradient is not None:
            close(gradient, wanted, msg=lambda text, name=name: f"gradient of {name}: {text}")
