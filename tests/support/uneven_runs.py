"""Runs in which a straggler gives units away for good, in fp64, and the same training in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from colossalai.booster.plugin import hybrid_parallel_plugin
from torch import Tensor, nn

from colossal_hetero import BalanceConfig
from colossal_hetero.colossalai_support.corrections import ModuleProxy
from tests.support.training import SlowdownScript, Trained, batch, boost, ours, scripted, tiny_vit

AFTER = 2
"""Iterations in which a rank is relieved before its units are permanently re-sharded."""
MAX_NORM = 0.5
"""Below the norm of the gradients, so that they are clipped."""
FASTER = 6
"""The iteration in which the slow rank becomes faster."""
RECOVERY = 13
"""The iteration in which it is as fast as the others again."""
STEPS = 19
NEVER = 10**6
"""No iteration."""

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def config(**choices: Any) -> BalanceConfig:
    choices = dict(mode="migrate", warmup_iterations=0, patience=1, measure_costs=False, reshard_after=AFTER) | choices
    return BalanceConfig(**choices)


def slow_until(straggler: int, recovery: int = RECOVERY) -> SlowdownScript:
    """Before the iteration ``recovery`` the straggler is slow, and the other ranks differ a little.

    With a recovery, the straggler becomes faster in the iteration :data:`FASTER`, and the next rank slow if there are
    more than two.
    """

    def slowdown(rank: int, iteration: int) -> float:
        if iteration >= recovery:
            return 1.0
        changes = recovery < NEVER and iteration >= FASTER
        if rank == straggler:
            return 2.5 if changes else 4.0
        if changes and dist.get_world_size() > 2 and rank == (straggler + 1) % dist.get_world_size():
            return 4.0
        return 1.0 + 0.2 * (rank % 3)

    return slowdown


@contextmanager
def exact_norms() -> Iterator[None]:
    """Let Colossal-AI sum squared norms over ranks in fp64. It does so in fp32, which changes the result by 1e-7."""
    with patch.object(hybrid_parallel_plugin, "torch", ModuleProxy(torch, float32=torch.float64)):
        yield


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two groups that have different options."""
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    return torch.optim.AdamW([dict(params=matrices, weight_decay=0.1), dict(params=vectors, lr=2e-3)], lr=3e-3)


def loss_of(model: nn.Module, number: int) -> Tensor:
    images, labels = batch(number)
    return nn.functional.cross_entropy(model(images.double()), labels)


def train_alone(
    steps: int, make: Callable[[nn.Module], torch.optim.Optimizer] = adamw
) -> tuple[nn.Module, list[float]]:
    """The model after training in one process, and the loss of each step."""
    model = tiny_vit().double().train()
    optimizer = make(model)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        norm = float(torch.stack([weight.grad.norm() for weight in model.parameters()]).norm())
        scale = torch.tensor(MAX_NORM / (norm + 1e-6)).clamp(max=1.0)  # in fp32, as in Colossal-AI
        for weight in model.parameters():
            weight.grad.mul_(scale)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def uneven_run(slowdown: SlowdownScript, make: MakeOptimizer = adamw, seed: int = 0, **options: Any) -> Trained:
    with scripted(slowdown):
        plugin = ours(config(), tp_size=dist.get_world_size(), max_norm=MAX_NORM, **options)
        return boost(plugin, tiny_vit(seed).double(), make)


def train(run: Trained, steps: int, each: Callable[[int], None] = lambda step: None) -> None:
    with exact_norms():
        for _ in range(steps):
            step = len(run.losses)
            loss = loss_of(run.model, step)
            run.booster.backward(loss, run.optimizer)
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.losses.append(loss.item())
            each(step)


def largest_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert set(actual) == set(expected)
    return max(float((actual[name] - expected[name]).abs().max()) for name in expected)
