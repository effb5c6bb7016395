"""Build models of timm and transformers by name, with random weights, and a batch for them. Nothing is downloaded."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import accelerator  # noqa: F401  (a quiet import of what transformers needs)
from ...planner.profile.vit import IMAGE_SIZE, VITS

__all__ = ["NamedModel", "build_model"]

CLASSES = 10
"""Number of classes, if the model does not say."""


@dataclass(frozen=True, eq=False)
class NamedModel:
    """A model with a batch and a loss."""

    model: nn.Module
    batch: Any
    """A batch of one sample, on the model's device."""
    criterion: Callable | None
    """The loss function; None if the model computes its loss itself."""


def build_model(
    name: str,
    *,
    image_size: int | None = None,
    sequence: int = 512,
    options: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> NamedModel:
    """Build ``timm:vit_tiny_patch16_224``, ``hf:gpt2``, ``hf:/folder/with/config.json`` or ``vit-1b``.

    Args:
        name: ``timm:`` and a model of timm; or ``hf:`` and a model type of transformers, built with its default
            configuration, or a folder with a ``config.json``; or one of
            :data:`~colossal_hetero.planner.profile.vit.VITS`.
        image_size: width and height of images, in pixels; None is the model's default.
        sequence: tokens of a text.
        options: changes of the configuration, e.g. ``{"depth": 6}`` for timm or ``{"n_layer": 6}`` for GPT-2.
        device: device of the model; on the meta device it takes no memory.

    Raises:
        ValueError: there is no such model, or it cannot be built with these arguments.
    """
    if name in VITS:
        options = _timm_options(name) | dict(options or {})
        return _from_timm("vit_base_patch16_224", image_size or IMAGE_SIZE, sequence, options, torch.device(device))
    library, _, model = name.partition(":")
    builders = {"timm": _from_timm, "hf": _from_transformers}
    if library not in builders or not model:
        raise ValueError(
            f"{name!r} is not a model name; write for example timm:vit_tiny_patch16_224 or hf:gpt2, or one of "
            f"{', '.join(VITS)}"
        )
    return builders[library](model, image_size, sequence, dict(options or {}), torch.device(device))


def _timm_options(name: str) -> dict[str, Any]:
    """What makes timm's ViT-Base the model ``name`` of :data:`VITS`."""
    sizes = VITS[name]
    widths = {"embed_dim": sizes.hidden, "depth": sizes.depth, "num_heads": sizes.heads, "patch_size": sizes.patch}
    return widths | {"num_classes": CLASSES, "class_token": False, "global_pool": "avg"}


def _from_timm(
    name: str, image_size: int | None, sequence: int, options: dict[str, Any], device: torch.device
) -> NamedModel:
    import timm

    if not timm.is_model(name.split(".")[0]):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.3)
        raise ValueError(f"timm has no model {name!r}; it has for example {', '.join(close) or 'vit_tiny_patch16_224'}")
    if image_size is not None:
        options["img_size"] = image_size
    try:
        with device:
            model = timm.create_model(name, pretrained=False, **options)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"timm:{name} cannot be built with {_in_words(options)}: {_first_line(error)}") from None
    size = image_size or model.default_cfg["input_size"][-1]
    channels = model.default_cfg["input_size"][0]
    images = torch.randn(1, channels, size, size, device=device)
    classes = max(getattr(model, "num_classes", CLASSES), 1)
    labels = torch.zeros(1, dtype=torch.long, device=device).clamp(max=classes - 1)
    return NamedModel(model, (images, labels), nn.functional.cross_entropy)


def _from_transformers(
    name: str, image_size: int | None, sequence: int, options: dict[str, Any], device: torch.device
) -> NamedModel:
    import transformers

    transformers.logging.set_verbosity_error()
    config = _config(name, options)
    if image_size is not None:
        if not hasattr(config, "image_size"):
            raise ValueError(f"hf:{name} does not take images; leave the image size out")
        config.image_size = image_size
    if hasattr(config, "image_size") and hasattr(config, "num_channels"):
        heads: list[Any] = [transformers.AutoModelForImageClassification]
        batch = {
            "pixel_values": torch.randn(1, config.num_channels, config.image_size, config.image_size, device=device),
            "labels": torch.zeros(1, dtype=torch.long, device=device),
        }
    else:
        heads = [transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM]
        longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or sequence
        if sequence > longest:
            raise ValueError(f"hf:{name} takes at most {longest} tokens, not {sequence}")
        # Token 2, because several models use 0 or 1 for padding.
        tokens = torch.full((1, sequence), 2, dtype=torch.long, device=device)
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        # transformers could also build these encoders as decoders, but those are other models.
        if config.model_type in ("bert", "roberta", "electra", "albert"):
            heads = heads[1:]
    head = next((each for each in heads if type(config) in each._model_mapping), None)
    if head is None:
        raise ValueError(f"hf:{name} ({type(config).__name__}) has no trainable head for text or images")
    try:
        with device:
            model = head.from_config(config)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"hf:{name} cannot be built with {_in_words(options)}: {_first_line(error)}") from None
    return NamedModel(model, batch, None)


def _config(name: str, options: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if name in CONFIG_MAPPING:
        config = CONFIG_MAPPING[name]()
    elif Path(name, "config.json").is_file():
        config = AutoConfig.from_pretrained(name, local_files_only=True)
    else:
        close = difflib.get_close_matches(name, list(CONFIG_MAPPING), n=3, cutoff=0.3)
        raise ValueError(
            f"transformers has no model type {name!r} (and there is no {Path(name, 'config.json')}); it has for "
            f"example {', '.join(close) or 'gpt2, llama, bert'}"
        )
    for key, value in options.items():
        if not hasattr(config, key):
            close = difflib.get_close_matches(key, list(config.to_dict()), n=1)
            raise ValueError(f"hf:{name} has no option {key!r}" + (f"; did you mean {close[0]}?" if close else ""))
        setattr(config, key, value)
    return config


def _in_words(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items()) or "its defaults"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
