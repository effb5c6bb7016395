"""Profiling on several ranks: none waits for another, each finds its limit, and training is unchanged. Ranks with
similar times of layers become one kind, and layers may communicate."""

import hashlib
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from colossalai.shardformer import ShardConfig, ShardFormer
from colossalai.zero.low_level import LowLevelZeroOptimizer
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from colossal_hetero.colossalai_support.accelerator import is_out_of_memory
from colossal_hetero.layers import TimmViTPolicy
from colossal_hetero.profiling import device_profiler
from colossal_hetero.profiling.aborted_step import abort_step
from colossal_hetero.profiling.device_profiler import profile_device
from colossal_hetero.profiling.layer_profiler import profile_layers
from colossal_hetero.profiling.local_collectives import local_collectives
from colossal_hetero.profiling.memory import recover
from colossal_hetero.profiling.optimizer_state import optimizer_state_bytes
from colossal_hetero.profiling.preserved_state import preserved_state
from tests.support.checks import of_all_ranks, on
from tests.support.harness import run_ranks
from tests.support.layer_profiles import times_of
from tests.support.random_examples import IS_THOROUGH
from tests.support.simulated_layers import Model, SimulatedClock, SlowSGD, batch, use_clock
from tests.support.training import make_step

KINDS = ("ddp", "zero1", "zero2", "fsdp", "fsdp_original", "fsdp_grad_op")
WIDTH = 37
CPU = torch.device("cpu")


class RunsOut(torch.autograd.Function):
    """The identity function. At ``place`` it raises an out-of-memory error instead."""

    place: str | None = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.depth = depth
        RunsOut.check(f"forward {depth}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        RunsOut.check(f"backward {ctx.depth}")
        return gradient, None

    @staticmethod
    def check(place: str) -> None:
        if RunsOut.place == place:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")


class Block(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(5)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RunsOut.apply(x + self.dropout(torch.relu(self.norm(self.linear(x)))), self.depth)


def build(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block(depth) for depth in range(3)), nn.Linear(WIDTH, 3))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind.startswith("fsdp"):
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=CPU,
            use_orig_params=kind == "fsdp_original",
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if kind == "fsdp_grad_op" else ShardingStrategy.FULL_SHARD,
        )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind.startswith("zero"):
        optimizer = LowLevelZeroOptimizer(optimizer, partition_grad=kind == "zero2", reduce_bucket_size=2000)
    return model, optimizer


def forward_backward(model: nn.Module, optimizer: Any, batch: int) -> torch.Tensor:
    loss = model(torch.randn(batch, 5, WIDTH)).square().mean()
    if isinstance(optimizer, LowLevelZeroOptimizer):
        optimizer.backward(loss)
    else:
        loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Any, steps: int) -> list[str]:
    losses = []
    for _ in range(steps):
        losses.append(forward_backward(model, optimizer, 4).item().hex())
        make_step(optimizer)
    return losses


def timed(model: nn.Module, optimizer: Any, batch: int) -> float:
    forward_backward(model, optimizer, batch)
    return 1 + 0.1 * batch


def outcome(model: nn.Module, losses: list[str]) -> tuple[list[str], str]:
    state = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers(), torch.get_rng_state()]:
        state.update(tensor.detach().contiguous().numpy().tobytes())
    return losses, state.hexdigest()


def trained(kind: str, before: int, interlude: Callable[[nn.Module, Any], Any]) -> tuple[Any, Any]:
    model, optimizer = build(kind)
    losses = train(model, optimizer, before)
    result = interlude(model, optimizer)
    return outcome(model, losses + train(model, optimizer, 2)), result


def profile_under_limits(model: nn.Module, optimizer: Any) -> tuple[int, bool, float]:
    """Profile while the last rank has a real limit of its address space. It runs out of memory, the others do not."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with preserved_state(model, optimizer), local_collectives(model), patch.object(device_profiler, "REPEATS", 1):
            if dist.get_rank() == dist.get_world_size() - 1:
                room = psutil.Process().memory_info().vms + (40 << 20)
                resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
            profile = profile_device(
                partial(timed, model, optimizer),
                1 << 18 if dist.get_rank() == dist.get_world_size() - 1 else 20,
                state_bytes_to_come=optimizer_state_bytes(optimizer),
                device=CPU,
                abort=partial(abort_step, model, optimizer),
            )
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return profile.max_batch, profile.memory_bound, profile.points[0].seconds


def run_out_everywhere(model: nn.Module, optimizer: Any) -> int:
    failures = 0
    with preserved_state(model, optimizer), local_collectives(model):
        for again in range(2):
            for place in [f"{way} {depth}" for way in ("forward", "backward") for depth in (0, 1, 2)]:
                RunsOut.place = place if dist.get_rank() == 0 else None
                try:
                    forward_backward(model, optimizer, 3)
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    failures += 1
                    recover(error)
                    abort_step(model, optimizer)
                RunsOut.place = None
                if again:
                    forward_backward(model, optimizer, 3)
    return failures


def scenario(kind: str) -> None:
    for before in (0, 2) if IS_THOROUGH else (2 * (KINDS.index(kind) % 2),):
        reference, _ = trained(kind, before, lambda *_: None)
        profiled, (largest, bound, seconds) = trained(kind, before, profile_under_limits)
        limited = dist.get_rank() == dist.get_world_size() - 1
        assert bound == limited and (largest == 20 or limited) and largest > 0 and seconds > 0, (largest, bound)
        assert profiled == reference
        interrupted, failures = trained(kind, before, run_out_everywhere)
        assert failures == (12 if dist.get_rank() == 0 else 0)
        assert interrupted == reference


# A start for each kind: memory that a process has freed but not returned makes its limit less tight.
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_runs_out_of_memory(kind: str) -> None:
    run_ranks(2, scenario, kind)


@on(2)
def no_rank_waits_for_another() -> None:
    """Rank 1 calls every collective; rank 0 calls none, and neither waits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 1:
        own, buffer = torch.arange(4.0), torch.arange(8.0)
        with local_collectives():
            gathered, shard, exchanged = torch.zeros(4 * size), torch.zeros(2), torch.zeros(4)
            work = dist.all_gather_into_tensor(gathered, own, async_op=True)
            assert work.wait() and work.is_completed() and torch.equal(gathered, own.repeat(size))
            assert work.get_future().wait()[0] is gathered
            dist.all_gather_into_tensor(buffer, buffer[4:])  # in place, as ZeRO's optimizer does
            assert torch.equal(buffer, torch.arange(4.0, 8.0).repeat(size))
            pieces = [torch.zeros(4) for _ in range(size)]
            dist.all_gather(pieces, own)
            assert all(torch.equal(piece, own) for piece in pieces)
            dist.reduce_scatter_tensor(shard, own)
            assert shard.tolist() == [2.0, 3.0]
            dist.reduce_scatter(shard, [torch.zeros(2), torch.ones(2)])
            assert shard.tolist() == [1.0, 1.0]
            assert dist.all_reduce(own, dist.ReduceOp.SUM, None, True).is_completed()
            assert dist.all_reduce(own) is None and own.tolist() == [0.0, 1.0, 2.0, 3.0]
            dist.broadcast(own, 0)
            dist.all_to_all_single(exchanged, own)
            objects: list[Any] = [None] * size
            dist.all_gather_object(objects, "mine")
            assert objects == ["mine"] * size
            dist.barrier()
        with pytest.raises(ZeroDivisionError), local_collectives():
            raise ZeroDivisionError
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size


@on(1)
def the_state_to_come_leaves_less_memory_for_samples() -> None:
    room = [100]

    @contextmanager
    def reserved(size: int, device: torch.device) -> Iterator[None]:
        room[0] -= size
        yield
        room[0] += size

    def run(batch: int) -> float:
        if 10 * batch > room[0]:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return 1 + 0.1 * batch

    with patch.object(device_profiler, "reserved_memory", reserved):
        found = [profile_device(run, 64, state_bytes_to_come=size, device=CPU).max_batch for size in (0, 30)]
    assert found == [10, 7]


# Layers --------------------------------------------------------------------------------------------------------------


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
