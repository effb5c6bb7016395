"""Checks that what is trained fits the plan: the model, the data loader, its batches, uneven batches, and LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from colossalai.pipeline.stage_manager import PipelineStageManager
from torch import nn
from torch.utils._pytree import tree_leaves

from ...data_parallel.config import BatchConfig
from ...io.text import count, spans
from ...planner.plans.plan import Plan
from ...profiling.layers.model_layers import find_block_row
from .unequal_chunks import check_one_row

__all__ = [
    "batches_to_evaluate",
    "check_batch_size",
    "check_global_batch",
    "check_lora",
    "check_model",
    "check_model_at_division",
    "checked_batches",
    "valid_batch_sizes",
]


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
    or one with an encoder and a decoder.

    Every policy asks it when a model is boosted. Colossal-AI itself only has an assertion without a message.
    """
    distribute = stage_manager.distribute_layers

    def distribute_layers(num_layers: int, num_stages: int | None = None, *args: Any, **kwargs: Any) -> list[int]:
        check_one_row(stage_manager, num_stages)
        if num_layers != plan.blocks:
            raise ValueError(_other_model(plan, num_layers))
        return distribute(num_layers, num_stages, *args, **kwargs)

    stage_manager.distribute_layers = distribute_layers


def _other_model(plan: Plan, num_layers: int) -> str:
    return (
        f"the plan divides {plan.blocks} blocks of {plan.model} into {list(plan.layers_per_stage)}, but the model has "
        f"{num_layers} blocks; plan with a profile of this model"
    )


def check_global_batch(plan: Plan, batches: BatchConfig) -> None:
    """Raise ``ValueError`` if the global batch that is divided unevenly has another size than the plan's."""
    if batches.global_batch_size != plan.global_batch:
        raise ValueError(
            f"global_batch_size={batches.global_batch_size} in batches contradicts the plan, which has "
            f"{plan.global_batch}; use {plan.global_batch}, or make a plan for {batches.global_batch_size}"
        )


def check_lora(plan: Plan) -> None:
    """Raise ``ValueError`` if LoRA adapters could not be saved: rank 0 saves what the first stage gathers."""
    ranks = sorted(plan.rank_order[0][0])
    if 0 not in ranks:
        raise ValueError(
            f"LoRA adapters are saved by rank 0, which must be in the first stage, but that has rank {spans(ranks)}; "
            "launch the ranks in the order of the plan's stages, or train without LoRA"
        )


def valid_batch_sizes(plan: Plan) -> tuple[int, ...]:
    """Samples that a replica's data loader may have in a batch, first those of a whole batch.

    ``execute_pipeline`` divides a whole batch into micro-batches. Without a pipeline the training loop may also
    accumulate gradients itself, so that the loader has micro-batches.
    """
    whole = plan.micro_batch * plan.replicas[0].micro_batches
    return (whole,) if len(plan.layers_per_stage) > 1 else (whole, plan.micro_batch)


def check_batch_size(plan: Plan, batch_size: int | None) -> None:
    """Raise ``ValueError`` if a replica's batch of ``batch_size`` samples does not fit ``plan``; None is unknown."""
    _check_size(plan, batch_size, valid_batch_sizes(plan))


def checked_batches(batches: Iterator[Any], plan: Plan) -> Iterator[Any]:
    """The same ``batches`` of a replica; raises ``ValueError`` when one does not have the size that the plan has."""
    for batch in batches:
        samples = _samples(batch)
        if samples is not None:
            _check_size(plan, samples, valid_batch_sizes(plan)[:1])
        yield batch


def batches_to_evaluate(batches: Iterator[Any], plan: Plan) -> Iterator[Any]:
    """The same ``batches`` of a replica; raises ``ValueError`` when the interleaved schedule cannot evaluate one.

    It takes the micro-batches of a batch in groups, one for each stage, and mixes up those of a smaller group.
    """
    for batch in batches:
        samples, stages = _samples(batch), len(plan.layers_per_stage)
        if plan.schedule == "interleaved" and samples is not None:
            micro_batches = -(-samples // plan.micro_batch)
            if micro_batches % stages:
                raise ValueError(
                    f"a batch of {count(samples, 'sample')} is {count(micro_batches, 'micro-batch')} of "
                    f"{plan.micro_batch}, but the interleaved schedule needs a multiple of {stages}, the number of "
                    f"stages; evaluate a multiple of {stages * plan.micro_batch} samples"
                )
        yield batch


def _samples(batch: Any) -> int | None:
    """How many samples a batch has; None without tensors."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return len(tensors[0]) if tensors else None


def _check_size(plan: Plan, batch_size: int | None, valid: tuple[int, ...]) -> None:
    if batch_size is not None and batch_size not in valid:
        raise ValueError(
            f"a batch of {batch_size} samples does not fit the plan: each of its {len(plan.replicas)} replicas takes "
            f"{count(plan.replicas[0].micro_batches, 'micro-batch')} of {plan.micro_batch}; use "
            f"batch_size={' or '.join(map(str, valid))} (and drop_last=True)"
        )
