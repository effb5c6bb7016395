"""Train a tiny vision transformer through ``Booster.boost``, with clocks whose times a test sets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.interface import OptimizerWrapper
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from transformers import PreTrainedModel

from colossal_hetero import BalanceConfig, BatchConfig, HeteroHybridParallelPlugin, HeteroZeroPlugin
from colossal_hetero.balance.clock import IterationTimes, KindTimes
from colossal_hetero.layers import TimmViTPolicy
from colossal_hetero.layers.transformers_policy import IS_NEWER_THAN_COLOSSALAI, TransformersPolicy
from colossal_hetero.plugin.hybrid import layer_balancing

BATCH = 6
CLASSES = 7


def tiny_vit(seed: int = 0, **options: Any) -> VisionTransformer:
    """A small ViT with heads of width 3. Its sizes are divisible by 2, 3 and 4, and are not powers of two."""
    torch.manual_seed(seed)
    sizes = dict(img_size=8, patch_size=4, num_classes=CLASSES, embed_dim=36, depth=2, num_heads=12, mlp_ratio=5 / 3)
    return VisionTransformer(**(sizes | options))


def batch(number: int = 0, replica: int = 0, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Images ``[size, 3, 8, 8]`` and labels of the batch with this number; each data-parallel replica has its own."""
    generator = torch.Generator().manual_seed(1000 * replica + number)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.arange(size) % CLASSES


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.float(), labels)


def by_labels(outputs: Tensor, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """The criterion of ``execute_pipeline``."""
    return loss_of(outputs, inputs[1])


def loss_of_batch(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    return loss_of(model(inputs[0]), inputs[1])


def run_backward(optimizer: Any, loss: Tensor) -> None:
    optimizer.backward(loss) if isinstance(optimizer, OptimizerWrapper) else loss.backward()


def make_step(optimizer: Any, loss: Tensor | None = None) -> None:
    """A step, boosted or in one process, after the backward pass of ``loss`` if it is given."""
    if loss is not None:
        run_backward(optimizer, loss)
    optimizer.step()
    optimizer.zero_grad()


SlowdownScript = Callable[[int, int], float]
"""A function of a global rank and an iteration that returns the slowdown χ."""


class ScriptedClock:
    """A clock with invented times: the script sets the slowdown, and the rank's actual pruning shortens them."""

    MATMUL_SECONDS = 0.8
    OTHER_SECONDS = 0.2
    sample_every = 1

    def __init__(self, slowdown: SlowdownScript) -> None:
        self._slowdown = slowdown
        self._finished: list[IterationTimes] = []
        self._full: tuple[float, ...] = ()

    def mark(self, part: str, kind: int | None = None, inner: bool = False) -> None: ...

    def start(self) -> None: ...

    def stop(self, tag: Any = None) -> None:
        iteration, shares = tag
        self._full = self._full or shares.loads
        slowdown = self._slowdown(dist.get_rank(), iteration)
        # Every kind has the same part of the work.
        kinds = {
            kind: KindTimes(
                self.MATMUL_SECONDS / len(self._full) * slowdown * load / full, self.OTHER_SECONDS / len(self._full)
            )
            for kind, (load, full) in enumerate(zip(shares.loads, self._full, strict=True))
        }
        matmul = math.fsum(times.movable for times in kinds.values())
        self._finished.append(IterationTimes(matmul, 0.01, self.OTHER_SECONDS, tag, kinds=kinds))

    def read(self) -> list[IterationTimes]:
        finished, self._finished = self._finished, []
        return finished


def no_straggler(rank: int, iteration: int) -> float:
    return 1.0


@contextmanager
def scripted(slowdown: SlowdownScript = no_straggler) -> Iterator[None]:
    """Plugins that boost a model inside this context use a :class:`ScriptedClock`."""
    with patch.object(layer_balancing, "make_clock", lambda *_: ScriptedClock(slowdown)):
        yield


@dataclass
class Trained:
    """The state of a training run on one rank."""

    losses: list[float]
    """The loss of each iteration; empty on pipeline stages that do not compute it."""
    model: Any
    optimizer: Any
    booster: Booster
    plugin: Any
    plans: list[tuple[float, ...]] = field(default_factory=list)
    """After each iteration, the pruned shares of all ranks of the group."""

    def finish(self, loss: Tensor | None = None) -> None:
        """Make a step, after the backward pass of ``loss`` if it is given."""
        if loss is not None:
            self.booster.backward(loss, self.optimizer)
        make_step(self.optimizer)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """This rank's part of all parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.model.unwrap().named_parameters()}


def ours(balance: BalanceConfig | None = None, **options: Any) -> HeteroHybridParallelPlugin:
    return HeteroHybridParallelPlugin(**(dict(pp_size=1, precision="fp32") | options), balance=balance)


def theirs(**options: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(**(dict(pp_size=1, precision="fp32", custom_policy=TimmViTPolicy()) | options))


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def sgd(model: nn.Module) -> Optimizer:
    """SGD with momentum. Unlike AdamW it does not amplify gradients that are zero except for rounding errors."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def boost(
    plugin: Any, model: nn.Module | None = None, make_optimizer: Callable[[nn.Module], Optimizer] = adamw
) -> Trained:
    model = tiny_vit() if model is None else model
    if IS_NEWER_THAN_COLOSSALAI and type(plugin) is HybridParallelPlugin and isinstance(model, PreTrainedModel):
        plugin.custom_policy = plugin.custom_policy or TransformersPolicy(model)  # Colossal-AI's own cannot be imported
    optimizer = make_optimizer(model)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer, loss_of)
    return Trained([], model, optimizer, booster, plugin)


def train(
    run: Trained,
    iterations: int,
    accumulation: int = 1,
    same_batch: bool = False,
    each: Callable[[int], None] = lambda iteration: None,
) -> Trained:
    """Continue ``run``; ``each`` is called with the number of the iteration after its step."""
    plugin, model, optimizer = run.plugin, run.model, run.optimizer
    replica = int(plugin.pg_mesh.coordinate(plugin.dp_axis))
    for iteration in range(iterations):
        total: float | None = None
        for micro in range(accumulation):
            images, labels = batch(0 if same_batch else accumulation * iteration + micro, replica)
            synchronized = micro == accumulation - 1
            with nullcontext() if synchronized else run.booster.no_sync(model, optimizer):
                if plugin.pp_size > 1:
                    loss = run.booster.execute_pipeline(
                        iter([(images, labels)]), model, by_labels, optimizer, return_loss=True
                    )["loss"]
                else:
                    loss = loss_of(model(images), labels) / accumulation
                    run.booster.backward(loss, optimizer)
            if loss is not None:
                total = (total or 0.0) + loss.item()
        make_step(optimizer)
        if total is not None:
            run.losses.append(total)
        balancer = getattr(plugin, "balancer", None)
        if balancer is not None:
            assert plugin.is_last_stage() == (total is not None)
            run.plans.append(balancer.plan.resize)
        each(iteration)
    return run


def pipeline_step(run: Any, batches: Iterator[Any], criterion: Callable[..., Tensor] = by_labels) -> float | None:
    """A step with ``execute_pipeline``; the loss, where this rank knows it. ``run``: as :class:`Trained`."""
    result = run.booster.execute_pipeline(batches, run.model, criterion, run.optimizer, return_loss=True)
    make_step(run.optimizer)
    return None if result["loss"] is None else float(result["loss"])


def mean_over_replicas(loss: float | None, samples: int) -> float:
    """The mean over the global batch, on every rank; ``loss`` is the mean over this replica's ``samples``, or None."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (loss, samples))
    known = sorted({(loss, samples) for loss, samples in everyone if loss is not None})
    return sum(loss * samples for loss, samples in known) / sum(samples for _, samples in known)


def train_alone(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor] = loss_of_batch,
    max_norm: float = 0.0,
    schedule: Any = None,
) -> list[float]:
    """Train as a usual script does, with plain torch in one process, or boosted; the loss of each batch."""
    losses = []
    for inputs in batches:
        loss = loss_of(model, inputs)
        run_backward(optimizer, loss)
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        make_step(optimizer)
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


def assert_same_parameters(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """Assert that parameters are equal bit for bit."""
    assert list(actual) == list(expected), what
    for name in expected:
        assert torch.equal(actual[name], expected[name]), f"{what}: {name} differs"


def zero_plugin(stage: int | str, global_batch_size: int, **options: Any) -> HeteroZeroPlugin:
    """A plugin with these settings of batches and other options."""
    names = {each.name for each in dataclasses.fields(BatchConfig)} & options.keys()
    settings = {name: value for name in names if (value := options.pop(name)) is not None}
    return HeteroZeroPlugin(stage, batches=BatchConfig(global_batch_size=global_batch_size, **settings), **options)


def save_checkpoint(run: Trained, folder: Path, sharded: bool) -> None:
    """All ranks save the model and the optimizer in ``folder``, which rank 0 makes."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    run.booster.save_model(run.model, str(folder / ("model" if sharded else "model.pt")), shard=sharded)
    run.booster.save_optimizer(run.optimizer, str(folder / ("optimizer" if sharded else "optimizer.pt")), shard=sharded)
    dist.barrier()


def load_checkpoint(run: Trained, folder: Path, sharded: bool) -> Trained:
    """Load what :func:`save_checkpoint` saved into the model and the optimizer of ``run``; returns ``run``."""
    run.booster.load_model(run.model, str(folder / ("model" if sharded else "model.pt")))
    run.booster.load_optimizer(run.optimizer, str(folder / ("optimizer" if sharded else "optimizer.pt")))
    return run


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights in a sharded checkpoint."""
    return {
        name: tensor
        for part in sorted(folder.glob("*.bin"))
        for name, tensor in torch.load(part, weights_only=True).items()
    }
