"""Models in training with a plan, which take turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.common import Timed

# isort: split
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster

from colossal_hetero import HeteroHybridParallelPlugin
from colossal_hetero.planner.cost.plan import Plan, Replica
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.profiling.layer_profiler import profile_layers


def make_batch(samples: int, image: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(samples, 3, image, image, generator=generator)
    return images, torch.randint(0, 10, (samples,), generator=generator)


def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(outputs, batch[1])


def measure_layers(model: nn.Module, micro_batch: int, image: int = 32) -> ModelProfile:
    """The times of the layers, while all ranks measure."""
    batch = make_batch(micro_batch, image)
    return profile_layers(model, batch, F.cross_entropy, micro_batches=[micro_batch], optimizer="adamw").profile


class Trained(Timed):
    """A model that is trained with one plan, by default with the batch that the plan gives this rank's replica."""

    def __init__(
        self,
        plan: Plan | str,
        model: nn.Module,
        image: int = 32,
        *,
        batch: Sequence[torch.Tensor] | None = None,
        precision: str = "fp32",
        **options: Any,
    ) -> None:
        self.seconds, self.losses = [], list[float]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.plugin = HeteroHybridParallelPlugin(plan=plan, precision=precision, **options)
        self.booster = Booster(plugin=self.plugin)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        self.plan: Plan = self.plugin.plan if isinstance(plan, str) else plan
        own = self.plugin.plan.replicas[self.plugin.replica()[0]]
        self.batch = list(batch or make_batch(own.micro_batches * self.plan.micro_batch, image))

    def iterate(self) -> float:
        """Train one iteration. The loss is added to ``losses`` of the last stage."""
        dist.barrier()
        get_accelerator().synchronize()
        start = time.perf_counter()
        run = self.booster.execute_pipeline(iter([self.batch]), self.model, loss, self.optimizer, return_loss=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        get_accelerator().synchronize()
        dist.barrier()  # an iteration ends when all ranks have finished it
        if run["loss"] is not None:
            self.losses.append(run["loss"].item())
        return time.perf_counter() - start


def shape(replica: Replica) -> str:
    """The rank of each stage, and its blocks."""
    return " then ".join(
        f"rank {stage.ranks[0]}: {'+'.join(str(stop - start) for start, stop in stage.block_ranges)}"
        for stage in replica.stages
    )
