"""Unequal stages in the schedules that give a stage several chunks of the model.

Colossal-AI's interleaved schedule cuts a model into ``stages × chunks`` parts, of which stage s holds the parts s,
s + stages, s + 2·stages, …; the zero-bubble one into ``2 · stages``, of which stage s holds the parts s and
2·stages − 1 − s, so that the pipeline goes there and back. Its stage manager can divide layers so, but its constructor
asserts one number per stage, with which either schedule fails later; the numbers are given to it afterwards here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from colossalai.pipeline.stage_manager import PipelineStageManager
from colossalai.shardformer.layer import linear

__all__ = ["give_chunks", "take_chunks", "unequal_chunks"]


def take_chunks(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[int] | None]:
    """The plugin's ``arguments`` for its constructor, and what is to be given to its stage manager afterwards.

    Raises:
        ValueError: ``num_layers_per_stage`` has not as many numbers as the schedule has parts.
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
    if style == "1f1b":
        return dict(arguments), layers
    # The constructor asserts one number per stage.
    return {**arguments, "num_layers_per_stage": None}, layers


def give_chunks(stage_manager: PipelineStageManager, layers: list[int]) -> None:
    """Let ``stage_manager`` divide a model into parts of so many ``layers``."""
    stage_manager.num_layers_per_stage = layers
    distribute = stage_manager.distribute_layers

    @functools.wraps(distribute)
    def distribute_layers(num_layers: int, *args: Any, **kwargs: Any) -> list[int]:
        if num_layers != sum(layers):
            raise ValueError(
                f"num_layers_per_stage={layers} adds up to {sum(layers)}; the model has {num_layers} layers"
            )
        return distribute(num_layers, *args, **kwargs)

    stage_manager.distribute_layers = distribute_layers


@contextmanager
def unequal_chunks() -> Iterator[None]:
    """Let stages build different numbers of the layers that zero-bubble schedules use.

    Each such layer asks all ranks whether they have built as many, for the random state that it would draw new weights
    from, and ranks that build fewer never answer. It is made from a layer that has weights and draws nothing.
    """
    make = linear.create_randomizer_with_offset

    def make_alone(seed: int, process_group: dist.ProcessGroup | None = None, **offsets: bool) -> Any:
        if process_group is None:
            offsets["offset_by_index"] = False
        return make(seed, process_group, **offsets)

    linear.create_randomizer_with_offset = make_alone
    try:
        yield
    finally:
        linear.create_randomizer_with_offset = make
