"""The vision transformer that three examples train, for 32 × 32 images."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from .options import IMAGE_SIZE


def build_vit(classes: int, *, hidden: int, depth: int, heads: int, patch: int) -> Any:
    """A timm ``VisionTransformer`` with fresh weights. ``hidden`` is its width, ``patch`` in pixels."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=IMAGE_SIZE,
        patch_size=patch,
        embed_dim=hidden,
        depth=depth,
        num_heads=heads,
        num_classes=classes,
        class_token=False,
        global_pool="avg",
    )


def describe_vit(parameters: int, hidden: int, depth: int, heads: int, patch: int) -> str:
    """For example "ViT, 256 wide, 4 deep, 4 heads, patch 8: 3.2 M parameters"."""
    return f"ViT, {hidden} wide, {depth} deep, {heads} heads, patch {patch}: {parameters / 1e6:.1f} M parameters"


def loss_of(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross-entropy of ``logits [B, classes]`` for ``batch``, images and labels ``[B]``."""
    return cross_entropy(logits.float(), batch[1])


def number_correct(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """How many of ``logits [B, classes]`` are largest at the labels of ``batch``."""
    return (logits.argmax(1) == batch[1]).sum().float()
