"""Checks that a model fits the plan, and stages with chosen numbers of layers in every schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.distributed as dist
from colossalai.pipeline.stage_manager import PipelineStageManager
from colossalai.shardformer.layer import linear
from torch import nn

from ...colossalai_support.corrections import replaced
from ...common.methods import wrap_method
from ...common.text import spans
from ...planner.cost.plan import Plan
from ...profiling.model_layers import find_block_row

# Unequal chunks ------------------------------------------------------------------------------------------------------
# Unequal stages in schedules with several chunks per stage. Of ``stages × chunks`` interleaved chunks, stage s holds s,
# s + stages, s + 2·stages, …; of ``2 · stages`` zero-bubble chunks, it holds s and 2·stages − 1 − s. Colossal-AI's
# stage manager can divide layers in these ways, but its constructor asserts one number per stage, with which both
# schedules fail later. So the numbers are set after the constructor.


def split_off_layers_per_chunk(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[int] | None]:
    """The ``arguments`` for the plugin's constructor, and the layers of each chunk for :func:`set_layers_per_chunk`."""
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
    return {**arguments, "num_layers_per_stage": None}, layers


def set_layers_per_chunk(stage_manager: PipelineStageManager, layers: list[int]) -> None:
    """Let ``stage_manager`` divide a model into chunks with these numbers of ``layers``."""
    stage_manager.num_layers_per_stage = layers
    _check_divided(
        stage_manager,
        sum(layers),
        lambda found: f"num_layers_per_stage={layers} adds up to {sum(layers)}; the model has {found} layers",
    )


def _check_divided(stage_manager: PipelineStageManager, expected: int, words: Callable[[int], str]) -> None:
    """Let ``stage_manager`` raise ``ValueError`` when it divides another number of layers than ``expected``, or a model
    with an encoder and a decoder: their policies ask it twice, each time for fewer stages than there are."""

    def distribute_layers(
        distribute: Callable[..., list[int]], num_layers: int, num_stages: int | None = None, *args: Any, **kwargs: Any
    ) -> list[int]:
        if num_stages not in (None, stage_manager.num_stages):
            raise ValueError(
                "in a model with an encoder and a decoder, like T5 or Whisper, Colossal-AI decides itself which stages "
                "hold the encoder, so that the layers of each stage cannot be chosen; leave out plan and "
                f"num_layers_per_stage, and give pp_size={stage_manager.num_stages} and num_microbatches"
            )
        if num_layers != expected:
            raise ValueError(words(num_layers))
        return distribute(num_layers, num_stages, *args, **kwargs)

    wrap_method(stage_manager, "distribute_layers", distribute_layers)


def unequal_layer_counts() -> AbstractContextManager[None]:
    """Let stages build different numbers of the layers that zero-bubble schedules use. Each such layer asks all ranks
    how many they have built, to choose the random state for new weights, and waits for ever if a rank builds fewer. The
    layers are made from layers that have weights and need no random state, so the question is left out."""
    make = linear.create_randomizer_with_offset

    def make_locally(seed: int, process_group: dist.ProcessGroup | None = None, **offsets: bool) -> Any:
        if process_group is None:
            offsets["offset_by_index"] = False
        return make(seed, process_group, **offsets)

    return replaced(linear, create_randomizer_with_offset=make_locally)


def check_model(model: nn.Module, plan: Plan) -> None:
    """Raise ``ValueError`` if ``model`` has another number of blocks than ``plan``; models without blocks pass."""
    try:
        num_layers = len(find_block_row(model).blocks)
    except ValueError:
        return
    if num_layers != plan.blocks:
        raise ValueError(_other_model(plan, num_layers))


def check_model_at_division(stage_manager: PipelineStageManager, plan: Plan) -> None:
    """Let ``stage_manager`` raise ``ValueError`` when it divides a model with another number of blocks than ``plan``,
    or one with an encoder and a decoder. Every policy asks it; Colossal-AI itself only has an assertion."""
    _check_divided(stage_manager, plan.blocks, partial(_other_model, plan))


def _other_model(plan: Plan, num_layers: int) -> str:
    return (
        f"the plan divides {plan.blocks} blocks of {plan.model} into {list(plan.layers_per_stage)}, but the model has "
        f"{num_layers} blocks; plan with a profile of this model"
    )


def check_lora(plan: Plan) -> None:
    """Raise ``ValueError`` if LoRA adapters could not be saved: rank 0 saves what the first stage gathers."""
    ranks = sorted(plan.rank_order[0][0])
    if 0 not in ranks:
        raise ValueError(
            f"LoRA adapters are saved by rank 0, which must be in the first stage, but that has rank {spans(ranks)}; "
            "launch the ranks in the order of the plan's stages, or train without LoRA"
        )
