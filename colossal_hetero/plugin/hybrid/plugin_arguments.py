"""The arguments of the hybrid plugin: by name, from a plan, and whether they fit each other, the ranks, and a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.pipeline.stage_manager import PipelineStageManager
from colossalai.shardformer.layer import linear
from torch import nn

from ...balance.config import BalanceConfig
from ...colossalai_support.corrections import replaced
from ...common.methods import check_names, wrap_method
from ...common.text import spans
from ...data_parallel.config import BatchConfig
from ...planner.cost.pass_order import zero_bubble_nodes
from ...planner.cost.plan import Plan, Replica
from ...profiling.model_layers import count_blocks


def arguments_by_name(plugin: type, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of Colossal-AI's plugin by name; ``TypeError`` for one that neither it nor ``plugin`` has."""
    known = [name for kind in (plugin, HybridParallelPlugin) for name in inspect.signature(kind).parameters]
    check_names(plugin.__name__, kwargs, [name for name in known if name not in ("args", "kwargs")])
    return inspect.signature(HybridParallelPlugin).bind(*args, **kwargs).arguments


def check_sizes_given(arguments: Mapping[str, Any], plan: object) -> None:
    missing = [name for name in ("tp_size", "pp_size") if arguments[name] is None]
    if missing and plan is None:
        raise TypeError(f"missing {' and '.join(missing)}, which may be left out only with a plan")


def balance_in_fp8(balance: BalanceConfig | None) -> BalanceConfig:
    """Mode "off", unless the user has asked for another one, which raises ``ValueError``."""
    if balance is not None and balance.mode != "off":
        raise ValueError(
            f"use_fp8=True computes whole products in 8 bits, but balance mode {balance.mode!r} computes parts of "
            "them, which would have another precision; use mode 'off', or leave use_fp8 out"
        )
    return balance or BalanceConfig(mode="off")


@contextmanager
def naming_sizes(model: nn.Module, tp_size: int) -> Iterator[None]:
    """Name the numbers where Colossal-AI only says that a number of heads cannot be divided over the ranks."""
    try:
        yield
    except AssertionError as error:
        if "divisible by tensor parallel size" not in str(error):
            raise
        config = getattr(model, "config", None)
        names = ("num_attention_heads", "num_key_value_heads")
        known = [f"{name}={getattr(config, name)}" for name in names if getattr(config, name, None) is not None]
        raise ValueError(
            f"this {type(model).__name__} cannot be divided over tp_size={tp_size} ranks: {error} It has "
            f"{' and '.join(known) or 'another number of heads'}; use a tp_size that divides it"
        ) from error


def arguments_from_plan(plan: Plan, replica: Replica, given: Mapping[str, Any]) -> dict[str, Any]:
    """The plugin's arguments that run a ``replica`` of ``plan``: those ``given`` and those that follow. A plan in ZeRO
    stage 0 says nothing about it: with another stage its devices need less memory."""
    pp_size, micro_batches = len(replica.stages), replica.micro_batches
    follows: dict[str, Any] = dict(tp_size=plan.tensor_parallel, pp_size=pp_size)
    if plan.zero_stage:
        follows["zero_stage"] = plan.zero_stage
    only_pipelines: dict[str, Any] = dict(
        pp_style=plan.schedule,
        num_layers_per_stage=list(replica.layers_per_chunk),
        microbatch_size=plan.micro_batch,
        num_microbatches=micro_batches,
        num_model_chunks=plan.chunks_per_stage,
    )
    for name, planned in (follows | only_pipelines | {"sp_size": 1}).items():
        value = given.get(name)
        if name == "num_layers_per_stage" and value is not None:
            value = list(value)
        if value is not None and value != planned:
            raise ValueError(f"{name}={value!r} contradicts the plan, which has {planned!r}; leave it out")
    if given.get("scheduler_nodes") is not None:
        raise ValueError("scheduler_nodes follow from the plan; leave them out")
    if plan.order_seconds is not None:
        only_pipelines["scheduler_nodes"] = zero_bubble_nodes(pp_size, micro_batches, plan.order_seconds)
    return {**given, **follows, **(only_pipelines if pp_size > 1 else {})}


def check_world_size(tp_size: int, pp_size: int) -> None:
    world = dist.get_world_size()
    for name, size in (("tp_size", tp_size), ("pp_size", pp_size)):
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if world % (tp_size * pp_size) != 0:
        raise ValueError(
            f"{world} ranks cannot be divided by tp_size={tp_size} × pp_size={pp_size}; "
            f"start a multiple of {tp_size * pp_size} ranks, or choose sizes whose product divides {world}"
        )


def check_uneven_batches(batches: BatchConfig, arguments: Mapping[str, Any]) -> None:
    if batches.cluster is not None:
        raise ValueError("BatchConfig(cluster=...) has an effect in HeteroZeroPlugin only; leave it out")
    if arguments["pp_size"] > 1:
        raise ValueError(
            f"batches cannot be combined with a pipeline (pp_size={arguments['pp_size']}): a plan gives each pipeline "
            'the micro-batches that fit its speed; give plan="auto" with planning=PlanConfig(...), or a plan file of '
            "colossal-hetero plan, and leave batches out"
        )
    # Without a mode, it is all_to_all; these two split sequences over the tensor-parallel ranks.
    mode = arguments.get("sequence_parallelism_mode")
    in_parts = arguments.get("enable_sequence_parallelism") and mode not in ("split_gather", "ring")
    sp_size = (arguments.get("sp_size") or 1) if in_parts else 1
    if sp_size > 1:
        raise ValueError(
            f"batches cannot be combined with sp_size={sp_size}: gradients are averaged over parts of sequences too; "
            "use sp_size=1, or leave batches out"
        )
    zero_stage = arguments.get("zero_stage", 0)
    if batches.accumulation == "per_rank" and zero_stage > 1:
        raise ValueError(
            f'accumulation="per_rank" needs zero_stage 0 or 1, not {zero_stage}, which synchronizes at every '
            'micro-batch; use accumulation="shared"'
        )


def zero_in_fp32(plugin: HybridParallelPlugin) -> AbstractContextManager[None]:
    """Let ``configure`` of Colossal-AI's ``plugin`` accept ZeRO in fp32, which its optimizer can do, as in
    ``LowLevelZeroPlugin``. Where ``configure`` hands the precision on, only "fp16" and "bf16" matter."""
    is_exact = plugin.precision == "fp32" and plugin.zero_stage
    return replaced(plugin, precision="float32" if is_exact else plugin.precision)


# Unequal stages in schedules with several chunks per stage. Colossal-AI's stage manager can divide layers over chunks
# (those of a stage are in ``planner/cost/pass_order.py``), but its constructor asserts one number per stage, with which
# both schedules fail later. So the numbers are set after the constructor.


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


def set_layers_per_chunk(stage_manager: PipelineStageManager, layers: list[int], plan: Plan | None) -> None:
    """Let ``stage_manager`` divide a model into chunks with these numbers of ``layers``, and refuse another number of
    them, and a model with an encoder and a decoder, whose policies ask twice, for fewer stages than there are."""
    stage_manager.num_layers_per_stage = layers

    def distribute_layers(
        distribute: Callable[..., list[int]], num_layers: int, num_stages: int | None = None, *args: Any, **kwargs: Any
    ) -> list[int]:
        if num_stages not in (None, stage_manager.num_stages):
            raise ValueError(
                "in a model with an encoder and a decoder, like T5 or Whisper, Colossal-AI decides itself which stages "
                "hold the encoder, so that the layers of each stage cannot be chosen; leave out plan and "
                f"num_layers_per_stage, and give pp_size={stage_manager.num_stages} and num_microbatches"
            )
        if num_layers != sum(layers):
            words = f"num_layers_per_stage={layers} adds up to {sum(layers)}; the model has {num_layers} layers"
            raise ValueError(words if plan is None else _other_model(plan, num_layers))
        return distribute(num_layers, num_stages, *args, **kwargs)

    wrap_method(stage_manager, "distribute_layers", distribute_layers)


def unequal_layer_counts() -> AbstractContextManager[None]:
    """Let stages build different numbers of the layers that zero-bubble schedules use. Each asks all ranks how many
    they have built, for the random state of new weights, and waits for ever if a rank builds fewer. Layers made from
    others need no random state, so the question is left out."""
    make = linear.create_randomizer_with_offset

    def make_locally(seed: int, process_group: dist.ProcessGroup | None = None, **offsets: bool) -> Any:
        if process_group is None:
            offsets["offset_by_index"] = False
        return make(seed, process_group, **offsets)

    return replaced(linear, create_randomizer_with_offset=make_locally)


def check_model(model: nn.Module, plan: Plan) -> None:
    """Raise ``ValueError`` if ``model`` has another number of blocks than ``plan``; models without blocks pass."""
    try:
        num_layers = count_blocks(model)
    except ValueError:
        return
    if num_layers != plan.blocks:
        raise ValueError(_other_model(plan, num_layers))


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
