"""timm's VisionTransformer under tensor parallelism equals the unsharded one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.layers import SwiGLU, SwiGLUPacked
from timm.models.vision_transformer import (
    Attention,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from torch.nn.functional import cross_entropy

from .harness import run_ranks
from .sharding import assert_same_as_unsharded, parallel_layer_counts, randomize


def vit(**options: Any) -> VisionTransformer:
    """Return a small ViT: 12 heads of 3, so that 2, 3 and 4 ranks get shares of 18, 12 and 9 that few sizes divide."""
    sizes = dict(img_size=8, patch_size=4, num_classes=7, embed_dim=36, depth=2, num_heads=12, mlp_ratio=4)
    torch.manual_seed(0)
    return randomize(VisionTransformer(**(sizes | options)))


def images_and_labels(batch: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, 8, 8, generator=generator), torch.arange(batch) % 7


def loss_of(model: VisionTransformer) -> torch.Tensor:
    images, labels = images_and_labels()
    return cross_entropy(model(images), labels)


class GatedAttention(Attention):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, gated=True, **kwargs)


class WideAttention(Attention):
    """Heads of 5 where the embedding has room for 3."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, attn_head_dim=5, **kwargs)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no biases": dict(qkv_bias=False, proj_bias=False),
    "qk_norm": dict(qk_norm=True),
    "layer scale, registers, average pool": dict(init_values=0.5, reg_tokens=2, global_pool="avg"),
    "no_embed_class, pre_norm": dict(no_embed_class=True, pre_norm=True),
    "attention pool": dict(class_token=False, global_pool="map"),
    "SwiGLU": dict(mlp_layer=SwiGLU, mlp_ratio=2),
    "packed SwiGLU": dict(mlp_layer=SwiGLUPacked, mlp_ratio=4),
    "gated attention": dict(attn_layer=GatedAttention),
    "wide heads": dict(attn_layer=WideAttention),
    "ResPostBlock": dict(block_fn=ResPostBlock),
    "ParallelThingsBlock": dict(block_fn=ParallelThingsBlock),
}


def _variant(options: dict[str, Any]) -> VisionTransformer:
    return vit(**options)


def _check_variants(names: list[str]) -> dict[str, dict[str, int]]:
    counts = {}
    for name in names:
        try:
            counts[name] = parallel_layer_counts(assert_same_as_unsharded(_variant(VARIANTS[name]), loss_of))
        except Exception as error:
            raise AssertionError(f"variant {name!r}: {error}") from error
    return counts


PER_BLOCK = {"HeteroFusedLinear1D_Col": 1, "HeteroLinear1D_Col": 1, "HeteroLinear1D_Row": 2}


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_loss_and_gradients_equal_those_of_the_unsharded_model(tp_size):
    names = ["plain", "qk_norm"] if tp_size > 2 else list(VARIANTS)
    for counts in run_ranks(tp_size, _check_variants, names):
        assert counts["plain"] == {kind: 2 * count for kind, count in PER_BLOCK.items()}
