"""The vision transformer that the ZeRO and the pipeline example train: its flags, their checks, and the model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Protocol

from usage import IMAGE_SIZE, UsageError, flag

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

__all__ = ["VitShape", "add_vit_flags", "build_vit", "check_vit", "describe_vit"]


class VitShape(Protocol):
    """What a command line says of the model."""

    @property
    def hidden(self) -> int: ...

    @property
    def depth(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def patch(self) -> int: ...


def add_vit_flags(parser: argparse.ArgumentParser, *, hidden: int, depth: int, heads: int, patch: int) -> None:
    """The flags of the model, with these defaults."""
    model = parser.add_argument_group("model", "a vision transformer")
    for name, default, what in (
        ("hidden", hidden, "embedding width"),
        ("depth", depth, "blocks"),
        ("heads", heads, "attention heads"),
        ("patch", patch, f"patch size in pixels; images are {IMAGE_SIZE} × {IMAGE_SIZE}"),
    ):
        model.add_argument(f"--{name}", type=int, metavar="N", default=default, help=f"{what} (default {default})")


def check_vit(shape: VitShape) -> None:
    """Raise ``UsageError`` if there is no such model."""
    for name in ("hidden", "depth", "heads", "patch"):
        value = getattr(shape, name)
        if value < 1:
            raise UsageError(f"{flag(name)} {value} must be at least 1")
    if IMAGE_SIZE % shape.patch:
        valid = ", ".join(str(size) for size in range(1, IMAGE_SIZE + 1) if IMAGE_SIZE % size == 0)
        raise UsageError(
            f"--patch {shape.patch} does not divide the image size {IMAGE_SIZE} × {IMAGE_SIZE}; valid are {valid}"
        )
    if shape.hidden % shape.heads:
        raise UsageError(f"--heads {shape.heads} does not divide --hidden {shape.hidden}; use a divisor of it")


def build_vit(shape: VitShape, classes: int) -> VisionTransformer:
    """A timm ``VisionTransformer`` for 32 × 32 images."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=IMAGE_SIZE,
        patch_size=shape.patch,
        embed_dim=shape.hidden,
        depth=shape.depth,
        num_heads=shape.heads,
        num_classes=classes,
        class_token=False,
        global_pool="avg",
    )


def describe_vit(shape: VitShape, parameters: int) -> str:
    """For example "ViT, 256 wide, 4 deep, 4 heads, patch 8: 3.2 M parameters"."""
    return (
        f"ViT, {shape.hidden} wide, {shape.depth} deep, {shape.heads} heads, patch {shape.patch}: "
        f"{parameters / 1e6:.1f} M parameters"
    )
