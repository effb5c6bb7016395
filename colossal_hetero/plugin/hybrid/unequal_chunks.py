"""Unequal stages in the schedules that give a stage several chunks of the model.

Colossal-AI's interleaved schedule divides a model into ``stages × chunks`` chunks, and stage s holds the chunks s,
s + stages, s + 2·stages, … The zero-bubble schedule divides it into ``2 · stages`` chunks, and stage s holds the chunks
s and 2·stages − 1 − s. Colossal-AI's stage manager can divide layers in these ways, but its constructor asserts one
number per stage, with which both schedules fail later. So the numbers are set here after the constructor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from colossalai.pipeline.stage_manager import PipelineStageManager
from colossalai.shardformer.layer import linear

__all__ = ["check_one_row", "set_layers_per_chunk", "split_off_layers_per_chunk", "unequal_layer_counts"]


def split_off_layers_per_chunk(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[int] | None]:
    """The ``arguments`` for the plugin's constructor, and the layers of each chunk for :func:`set_layers_per_chunk`.

    Raises:
        ValueError: ``num_layers_per_stage`` does not have one whole number of at least 1 for each chunk.
    """
    given, pp_size = arguments.get("num_layers_per_stage"), arguments["pp_size"]
    if given is None or pp_size == 1:
        return dict(arguments), None
    style = arguments.get("pp_style", "1f1b")
    chunks = 1 if style == "1f1b" else arguments.get("num_model_chunks", 1)
    layers = [int(count) for count in given]
    if len(layers) != pp_size * chunks:
        parts = f"{pp_size} stages" + (f" × {chunks} chunks" if style != "1f1b" else "")
        order = "" if style == "1f1b" else f", one per chunk, in the order of the model, for the {style} schedule"
        raise ValueError(
            f"num_layers_per_stage={layers} has {len(layers)} numbers for {parts}; give {pp_size * chunks}{order}"
        )
    if min(layers) < 1 or any(count != whole for count, whole in zip(given, layers, strict=True)):
        raise ValueError(
            f"num_layers_per_stage={list(given)} is not possible: each stage holds a whole number of layers, at least 1"
        )
    if style == "1f1b":
        return dict(arguments), layers
    # The constructor asserts one number per stage.
    return {**arguments, "num_layers_per_stage": None}, layers


def set_layers_per_chunk(stage_manager: PipelineStageManager, layers: list[int]) -> None:
    """Let ``stage_manager`` divide a model into chunks with these numbers of ``layers``."""
    stage_manager.num_layers_per_stage = layers
    distribute = stage_manager.distribute_layers

    @functools.wraps(distribute)
    def distribute_layers(num_layers: int, num_stages: int | None = None, *args: Any, **kwargs: Any) -> list[int]:
        check_one_row(stage_manager, num_stages)
        if num_layers != sum(layers):
            raise ValueError(
                f"num_layers_per_stage={layers} adds up to {sum(layers)}; the model has {num_layers} layers"
            )
        return distribute(num_layers, num_stages, *args, **kwargs)

    stage_manager.distribute_layers = distribute_layers


def check_one_row(stage_manager: PipelineStageManager, num_stages: int | None) -> None:
    """Raise ``ValueError`` if a policy divides a model with an encoder and a decoder.

    Such a policy asks ``stage_manager`` twice, each time for fewer stages than there are.

    Args:
        num_stages: the number of stages that the policy asks for; None for all.
    """
    if num_stages not in (None, stage_manager.num_stages):
        raise ValueError(
            "in a model with an encoder and a decoder, like T5 or Whisper, Colossal-AI decides itself which stages "
            "hold the encoder, so that the layers of each stage cannot be chosen; leave out plan and "
            f"num_layers_per_stage, and give pp_size={stage_manager.num_stages} and num_microbatches"
        )


@contextmanager
def unequal_layer_counts() -> Iterator[None]:
    """Let stages build different numbers of the layers that zero-bubble schedules use.

    Each such layer asks all ranks how many they have built, to choose the random state for new weights. If a rank
    builds fewer layers, it never answers. The layers are made from layers that have weights, so they need no random
    state, and the question is left out.
    """
    make = linear.create_randomizer_with_offset

    def make_locally(seed: int, process_group: dist.ProcessGroup | None = None, **offsets: bool) -> Any:
        if process_group is None:
            offsets["offset_by_index"] = False
        return make(seed, process_group, **offsets)

    linear.create_randomizer_with_offset = make_locally
    try:
        yield
    finally:
        linear.create_randomizer_with_offset = make
