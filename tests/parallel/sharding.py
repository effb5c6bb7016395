"""Shard a model over all ranks and compare it with the model it was made from."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from colossalai.shardformer import ShardConfig, ShardFormer
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


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter, biases and norms included, values whose gradients are all of a visible size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms keep a weight near one, or deep models lose their signal.
            parameter.copy_(1 + 0.1 * noise if (parameter == 1).all() else 0.1 * noise)
    return model


def shard(model: nn.Module, policy: Policy | None = None) -> nn.Module:
    """Shard ``model`` over all ranks by ``policy``, by default its own with this package's layers."""
    config = ShardConfig(tensor_parallel_process_group=dist.group.WORLD)
    return ShardFormer(config).optimize(model, policy or hetero_policy(model))[0]


def own_share(parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of ``whole``, a tensor laid out like the unsharded ``parameter``."""
    if is_customized_distributed_tensor(parameter):
        return parameter.shard_fn(whole)
    if is_distributed_tensor(parameter):
        return distribute_tensor(whole.clone(), get_device_mesh(parameter), get_sharding_spec(parameter))
    return whole


def hetero_layer_counts(model: nn.Module) -> dict[str, int]:
    """Return how many of this package's layers ``model`` has, by class name."""
    return dict(Counter(type(m).__name__ for m in model.modules() if type(m).__name__.startswith("Hetero")))


def assert_same_as_unsharded(
    model: nn.Module,
    loss_of: Callable[[nn.Module], torch.Tensor],
    policy: Policy | None = None,
    **tolerances: Any,
) -> nn.Module:
    """Assert that loss and gradients of the sharded ``model`` are those of an unsharded copy.

    ``loss_of`` runs a model on the same inputs each time and returns a scalar. Returns the sharded model.
    """
    tolerances = {"rtol": 2e-4, "atol": 2e-5, **tolerances}
    reference = copy.deepcopy(model)
    expected = loss_of(reference)
    expected.backward()
    sharded = shard(model, policy)
    loss = loss_of(sharded)
    loss.backward()
    torch.testing.assert_close(loss, expected, **tolerances, msg=lambda text: f"loss: {text}")
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    seen = 0
    for name, parameter in sharded.named_parameters():
        whole = gradients[name]
        if whole is None or parameter.grad is None:
            assert whole is None and parameter.grad is None, f"only one of the models has a gradient of {name}"
            continue
        seen += 1
        torch.testing.assert_close(
            parameter.grad,
            own_share(parameter, whole),
            **tolerances,
            msg=lambda text, name=name: f"gradient of {name}: {text}",
        )
    assert seen > 0, "nothing has a gradient"
    return sharded
