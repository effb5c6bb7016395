"""A vision transformer that all ranks of the default process group train as one tensor-parallel group."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

from benchmarks.common import Timed

# isort: split
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin

from colossal_hetero import BalanceConfig, HeteroHybridParallelPlugin
from colossal_hetero.layers.timm_vit import TimmViTPolicy
from colossal_hetero.testing.stragglers import Stragglers, inject_stragglers

from .part import Machine

CLASSES = 10


@dataclass(frozen=True)
class Shape:
    """Sizes of a vision transformer and of its batch."""

    width: int
    depth: int
    heads: int
    image: int
    patch: int
    batch: int

    @property
    def activation_bytes(self) -> int:
        """Of the activations of a batch between two blocks, in single precision: patches and the class token."""
        return self.batch * ((self.image // self.patch) ** 2 + 1) * self.width * 4

    def build(self) -> VisionTransformer:
        """The model, always with the same weights."""
        torch.manual_seed(1)
        return VisionTransformer(
            img_size=self.image,
            patch_size=self.patch,
            embed_dim=self.width,
            depth=self.depth,
            num_heads=self.heads,
            num_classes=CLASSES,
        )

    def samples(self, device: torch.device, batches: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels of so many batches, always the same."""
        generator = torch.Generator().manual_seed(2)
        count = batches * self.batch
        images = torch.randn(count, 3, self.image, self.image, generator=generator)
        return images.to(device), torch.randint(0, CLASSES, (count,), generator=generator).to(device)


def shape_for(machine: Machine, full: Shape) -> Shape:
    """``full``, or sizes that a CPU runs in a moment."""
    return Shape(width=32, depth=2, heads=4, image=8, patch=4, batch=4) if machine.is_tiny else full


class VitTraining(Timed):
    """Trains the same batch again and again in single precision.

    Args:
        device: of this rank.
        shape: sizes of the model and the batch.
        balance: what the plugin does about slow ranks; None: Colossal-AI's own plugin.
        slowdowns: by rank, how often it computes each product; ranks that are missing compute it once.
    """

    def __init__(
        self,
        device: torch.device,
        shape: Shape,
        balance: BalanceConfig | None,
        slowdowns: Mapping[int, float] | None = None,
    ) -> None:
        model = shape.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        sizes: dict[str, Any] = dict(tp_size=dist.get_world_size(), pp_size=1, precision="fp32")
        self.plugin: Any = (
            HybridParallelPlugin(custom_policy=TimmViTPolicy(), **sizes)
            if balance is None
            else HeteroHybridParallelPlugin(balance=balance, **sizes)
        )
        self._booster = Booster(plugin=self.plugin)
        self.model, self.optimizer, *_ = self._booster.boost(model, optimizer)
        if slowdowns:
            inject_stragglers(self.model, self.optimizer, Stragglers(slowdowns=slowdowns))
        self.images, self.labels = shape.samples(device)
        self.losses: list[float] = []
        self.seconds = []

    def iterate(self) -> float:
        """Train one iteration. The loss is added to ``losses``."""
        get_accelerator().synchronize()
        begin = time.perf_counter()
        loss = F.cross_entropy(self.model(self.images), self.labels)
        self._booster.backward(loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        get_accelerator().synchronize()
        seconds = time.perf_counter() - begin
        self.losses.append(loss.item())
        return seconds
