"""Runs in which a rank gives units away for good, in fp64, and the same training in one process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from colossalai.booster.plugin import hybrid_parallel_plugin
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from colossal_hetero import BalanceConfig
from colossal_hetero.colossalai_support.corrections import ModuleProxy
from tests.support.migration_runs import migrate, migrating_run
from tests.support.training import Trained, batch, tiny_vit

MAX_NORM = 0.5
"""Below the norm of the gradients, so that they are clipped."""
STEPS = 3
"""One in which units migrate, and two after they were permanently re-sharded."""

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def config(**choices: Any) -> BalanceConfig:
    """Units are permanently re-sharded after a step, by a plan that the test gives."""
    return migrate("block", **(dict(warmup_iterations=10**6, reshard_after=1) | choices))


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


def small_vit(seed: int = 0) -> nn.Module:
    """A model with a block of each kind, in fp64."""
    return tiny_vit(seed, depth=1).double()


def loss_of(model: nn.Module, number: int) -> Tensor:
    images, labels = batch(number)
    return cross_entropy(model(images.double()), labels)


def relieved_run(
    straggler: int | None, model: nn.Module, make: MakeOptimizer = adamw, choices: Any = None, **options: Any
) -> Trained:
    """A boosted model, in which the global rank ``straggler`` gives units away for good; with ``choices`` of the
    balancing and ``options`` of the plugin."""
    options, choices = dict(tp_size=dist.get_world_size()) | options, dict(reshard_after=1) | (choices or {})
    return migrating_run("block", () if straggler is None else straggler, model, choices, make, **options)


def uneven_run(straggler: int | None, make: MakeOptimizer = adamw, seed: int = 0, **options: Any) -> Trained:
    return relieved_run(straggler, small_vit(seed), make, max_norm=MAX_NORM, **options)


def backward_of(run: Trained) -> Callable[[Tensor], None]:
    return partial(run.booster.backward, optimizer=run.optimizer)


def train_in_parts(
    model: nn.Module,
    optimizers: Sequence[Any],
    backward: Callable[[Tensor], Any],
    steps: int,
    parts: int = 1,
    before: Mapping[int, Callable[[], None]] | None = None,
) -> list[float]:
    """Train with batches in ``parts`` micro-batches. ``before`` has what is called before steps, by their number."""
    losses = []
    for step in range(steps):
        if before and step in before:
            before[step]()
        images, labels = batch(step)
        for part in range(parts):
            loss = cross_entropy(model(images[part::parts].double()), labels[part::parts]) / parts
            backward(loss)
            losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return losses


class _Clipping:
    """An optimizer of one process that clips gradients first."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer, self.zero_grad = model, optimizer, optimizer.zero_grad

    def step(self) -> None:
        norm = float(torch.stack([weight.grad.norm() for weight in self._model.parameters()]).norm())
        scale = torch.tensor(MAX_NORM / (norm + 1e-6)).clamp(max=1.0)  # in fp32, as in Colossal-AI
        for weight in self._model.parameters():
            weight.grad.mul_(scale)
        self._optimizer.step()


def train_alone(
    steps: int, make: MakeOptimizer = adamw, make_model: Callable[[], nn.Module] = small_vit
) -> tuple[nn.Module, list[float]]:
    model = make_model().train()
    return model, train_in_parts(model, [_Clipping(model, make(model))], lambda loss: loss.backward(), steps)


def train(run: Trained, steps: int, each: Callable[[int], None] = lambda step: None) -> None:
    with exact_norms():
        for _ in range(steps):
            step = len(run.losses)
            loss = loss_of(run.model, step)
            run.finish(loss)
            run.losses.append(loss.item())
            each(step)


def largest_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert set(actual) == set(expected)
    return max(float((actual[name] - expected[name]).abs().max()) for name in expected)
