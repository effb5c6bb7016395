"""The model that the command line asks for: by sizes, or by the name of a timm model."""

from __future__ import annotations

import difflib
from typing import Any

import torch

from colossal_hetero.planner.profile.estimate import VITS
from examples.common.options import IMAGE_SIZE, UsageError
from examples.common.tensor_parallel import Layout, check_model_sizes
from examples.common.vit import build_vit, describe_vit
from examples.vit.options import VitOptions


def build_chosen_vit(options: VitOptions, classes: int) -> Any:
    """The model that the ViT example's flags ask for: by sizes, or by the name of a timm model."""
    import timm

    if options.has_sizes:
        return build_vit(classes, **options.vit_sizes)
    patch = {} if options.patch is None else {"patch_size": options.patch}
    return timm.create_model(options.model, img_size=IMAGE_SIZE, num_classes=classes, pretrained=False, **patch)


def describe_chosen_vit(options: VitOptions, model: Any) -> str:
    """The model's name or sizes, and its number of parameters."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if options.has_sizes:
        return describe_vit(parameters, **options.vit_sizes)
    return f"{options.model}: {parameters / 1e6:.1f} M parameters"


def check_model(options: VitOptions, layout: Layout) -> None:
    """Find whether ``--model`` names a model that can be built for these images and shared by these ranks.

    Raises:
        UsageError: it does not.
    """
    if options.has_sizes:
        return
    import timm
    from timm.models.vision_transformer import VisionTransformer

    name = f"--model {options.model}"
    if not timm.is_model(options.model.split(".")[0]):
        known = timm.list_models(module="vision_transformer")
        similar = difflib.get_close_matches(options.model, known, n=3, cutoff=0.3)
        others = f"there are also {' and '.join(VITS)}"
        raise UsageError(
            f"{name}: timm has no such model; it has for example {', '.join(similar or known[:3])}; {others}"
        )
    try:
        with torch.device("meta"):
            model = build_chosen_vit(options, classes=2)
    except TypeError:
        raise UsageError(
            f"{name} does not take an image size; valid are timm's models of class VisionTransformer, for example "
            "vit_tiny_patch16_224"
        ) from None
    except (AssertionError, RuntimeError, ValueError, ZeroDivisionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"{name} cannot be built for {IMAGE_SIZE} × {IMAGE_SIZE} images ({reason}); try another --patch or model"
        ) from None
    if not isinstance(model, VisionTransformer):
        raise UsageError(f"{name} is a {type(model).__name__}; valid are timm's models of class VisionTransformer")
    if model.patch_embed.num_patches == 0 or IMAGE_SIZE % model.patch_embed.patch_size[0]:
        raise UsageError(
            f"{name} has a patch size of {model.patch_embed.patch_size[0]}, which does not divide the image size "
            f"{IMAGE_SIZE}; choose one with --patch, for example --patch 4"
        )
    sizes = {
        "heads": {block.attn.num_heads for block in model.blocks if hasattr(block, "attn")},
        "MLP features": {
            block.mlp.fc2.in_features for block in model.blocks if hasattr(getattr(block, "mlp", None), "fc2")
        },
    }
    check_model_sizes(name, {what: values for what, values in sizes.items() if values}, len(model.blocks), layout)
