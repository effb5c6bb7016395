"""Profiling layers on several ranks: ranks with similar times become one kind, and layers may communicate."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from colossal_hetero.layers import TimmViTPolicy
from colossal_hetero.profiling.layer_profiler import profile_layers

# isort: split
from colossalai.shardformer import ShardConfig, ShardFormer

from tests.support.checks import of_all_ranks, on
from tests.support.layer_profiles import times_of
from tests.support.simulated_layers import Model, SimulatedClock, SlowSGD, batch, use_clock


def measure(model: nn.Module, clock: SimulatedClock, **options: Any) -> Any:
    """Profile with a simulated clock. Without ``group``, ranks must not communicate: their rounds differ."""
    with pytest.MonkeyPatch.context() as patch:
        use_clock(clock, patch)
        options = {"micro_batches": [1, 2], "min_seconds": 1.0, **options}
        return profile_layers(model, batch(), F.cross_entropy, optimizer=partial(SlowSGD, clock=clock), **options)


@on(4)
def ranks_with_similar_times_are_one_kind() -> None:
    clock = SimulatedClock([1.0, 0.25, 0.96, 0.25][dist.get_rank()])
    measured = measure(Model(clock), clock)
    profile = measured.profile
    assert of_all_ranks(profile) == [profile] * 4
    assert measured.devices == profile.rank_devices == ("cpu", "cpu-2", "cpu", "cpu-2")
    assert len(measured.memory_bytes) == 4
    assert profile.devices == ("cpu", "cpu-2")
    assert times_of(profile, "cpu", 1, 1).forward_seconds[1] == pytest.approx(0.003 * (1 + 1 / 0.96) / 2, rel=0.05)
    assert times_of(profile, "cpu-2", 1, 1).forward_seconds[1] == pytest.approx(0.012, rel=0.1)
    assert times_of(profile, "cpu-2", 1, 2).update_seconds[1] == pytest.approx(16 * SlowSGD.SECONDS, rel=0.1)


class Summed(nn.Module):
    def __init__(self, clock: SimulatedClock, *seconds: float) -> None:
        super().__init__()
        self.inner = Model(clock, blocks=(seconds,)).blocks[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sum.apply(self.inner(x))


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@on(2)
def layers_that_communicate_are_measured_together() -> None:
    clock = SimulatedClock([1.0, 0.5][dist.get_rank()])
    profile = measure(Model(clock, block=Summed), clock, tensor_parallel=2, group=dist.group.WORLD).profile
    assert of_all_ranks(profile) == [profile] * 2
    assert profile.rank_devices == ("cpu", "cpu")
    assert profile.tensor_parallel_degrees("cpu") == (2,) and profile.sizes[0].tensor_parallel == 2
    # The profile has the times of the slowest rank. The simulated clock does not count waiting in collectives.
    assert times_of(profile, "cpu", 2, 2).forward_seconds[1] == pytest.approx(2 * 0.006, rel=0.2)


@on(2)
def a_failure_on_one_rank_is_raised_on_all() -> None:
    clock = SimulatedClock()
    model = Model(clock)
    if dist.get_rank() == 1:
        model.head.linear.weight.data = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match=r"(?s)^measuring layers failed on rank 1: RuntimeError: .*mat1 and mat2"):
        measure(model, clock)


def vision_transformer() -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=3, num_heads=2, num_classes=5)


@on(2)
def a_real_model_is_measured_as_its_shards() -> None:
    config = ShardConfig(tensor_parallel_process_group=dist.group.WORLD, enable_tensor_parallelism=True)
    model, _ = ShardFormer(config).optimize(vision_transformer(), policy=TimmViTPolicy())
    images = torch.randn(2, 3, 8, 8), torch.arange(2)
    options: dict[str, Any] = {"tensor_parallel": 2, "group": dist.group.WORLD}
    before = [parameter.clone() for parameter in model.parameters()]
    one = profile_layers(model, images, F.cross_entropy, micro_batches=[1, 2], min_seconds=0.0, **options).profile
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))
    assert of_all_ranks(one) == [one] * 2
    whole = profile_layers(vision_transformer(), images, F.cross_entropy, micro_batches=[1], min_seconds=0.0).profile
    own, all_of = one.sizes[0], whole.sizes[0]
    assert one.blocks == whole.blocks == 3 and own.tensor_parallel == 2
    # qkv and the MLP's first layer are halved with their biases. proj and the MLP's second layer are halved without
    # their biases. Norms are not divided.
    h, four = 16, 4
    halves = four * (3 * h * (h + 1) + h * h + 4 * h * (h + 1) + 4 * h * h) // 2
    assert own.parameter_bytes[1] == halves + four * (2 * h + 4 * h)
    assert own.parameter_bytes[0] == all_of.parameter_bytes[0]
    assert all_of.activation_bytes[1] / 2 < own.activation_bytes[1] < all_of.activation_bytes[1]
    assert own.output_bytes == all_of.output_bytes
