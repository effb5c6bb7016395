"""SEMI's vision transformers, or what one of several tensor-parallel ranks computes of them, on a single rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from timm.layers import Mlp
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor, nn

from colossal_hetero.planner.profile.estimate import IMAGE_SIZE, VITS, VitSizes
from examples.common.vit import build_vit

# isort: split
from colossalai.shardformer import ShardConfig, ShardFormer
from colossalai.shardformer.policies.base_policy import Policy

__all__ = ["CLASSES", "TINY", "VitShard", "with_parallel_layers"]

CLASSES = 10

TINY = VitSizes(hidden=64, depth=2, heads=8, patch=8)
"""A model for a CPU."""


@dataclass(frozen=True)
class VitShard:
    """One rank's part of a model."""

    sizes: VitSizes
    shards: int
    """Ranks that share each block; 1 is the whole model."""

    @classmethod
    def of(cls, name: str, shards: int, is_tiny: bool) -> VitShard:
        """Of a model in :data:`~colossal_hetero.planner.profile.estimate.VITS`, or of :data:`TINY` in its place."""
        return cls(TINY if is_tiny else VITS[name], 2 if is_tiny and shards > 1 else shards)

    def build(self, device: torch.device, dtype: torch.dtype) -> VisionTransformer:
        """A model whose blocks have one rank's heads and hidden units, with fresh weights."""
        sizes = self.sizes
        with device:
            model: VisionTransformer = build_vit(CLASSES, **asdict(sizes))
            for block in model.blocks if self.shards > 1 else ():
                head_width = sizes.hidden // sizes.heads
                block.attn = Attention(
                    sizes.hidden, sizes.heads // self.shards, attn_head_dim=head_width, qkv_bias=True
                )
                block.mlp = Mlp(sizes.hidden, 4 * sizes.hidden // self.shards)
        return model.to(dtype)

    def batch(self, images: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Random images ``[images, 3, 32, 32]`` and labels."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(images, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        labels = torch.randint(CLASSES, (images,), generator=generator)
        return x.to(device, dtype), labels.to(device)

    def flop(self, images: int) -> float:
        """Operations of the products and of attention in the blocks, in a forward and a backward pass."""
        sizes = self.sizes
        patches = (IMAGE_SIZE // sizes.patch) ** 2
        weights = 12 * sizes.hidden**2 / self.shards
        attention = 2 * patches * sizes.hidden / self.shards
        return 3.0 * 2.0 * images * patches * sizes.depth * (weights + attention)


def with_parallel_layers(model: VisionTransformer, policy: Policy) -> nn.Module:
    """``model`` with the layers of ``policy``, for a tensor-parallel group that consists of this rank.

    Call it on a rank that is alone in ``torch.distributed``, or whose collectives reach nobody.
    """
    config = ShardConfig(tensor_parallel_process_group=dist.group.WORLD, enable_tensor_parallelism=True)
    return ShardFormer(config).optimize(model, policy=policy)[0]
