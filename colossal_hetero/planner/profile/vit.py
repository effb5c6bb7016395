"""Sizes of the vision transformers that SEMI trains (Sec. V-A), ViT-1B and ViT-3B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["IMAGE_SIZE", "VITS", "VitSizes"]

IMAGE_SIZE = 32
"""Width and height of CIFAR-10's images, in pixels."""


@dataclass(frozen=True, kw_only=True)
class VitSizes:
    """A vision transformer whose MLP is four times as wide as its embedding."""

    hidden: int
    """Width of the embedding."""
    depth: int
    """Number of blocks."""
    heads: int
    """Attention heads in a block."""
    patch: int
    """Width and height of a patch, in pixels."""


VITS: Mapping[str, VitSizes] = {
    "vit-1b": VitSizes(hidden=2048, depth=24, heads=32, patch=4),
    "vit-3b": VitSizes(hidden=3072, depth=24, heads=48, patch=4),
}
"""By name. ViT-1B has 1.2 billion parameters (hidden 2048, depth 24 and 64 patches, Sec. II-B). Of ViT-3B the paper
says only that it has 2.7 billion; a model of depth 24 has as many with hidden 3072. It does not say the number of
heads; here they are 64 wide, as in ViT-Base."""
