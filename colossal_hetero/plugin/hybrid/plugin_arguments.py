"""The arguments of Colossal-AI's hybrid plugin: by name, from a plan, and whether they fit the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from colossalai.booster.plugin import HybridParallelPlugin

from ...data_parallel.config import BatchConfig
from ...planner.plans.plan import Plan, Replica
from ...planner.schedules.zero_bubble import zero_bubble_nodes

__all__ = ["arguments_by_name", "arguments_from_plan", "check_uneven_batches", "check_world_size", "zero_in_fp32"]


def arguments_by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of Colossal-AI's plugin by name; ``args`` are the positional ones after ``tp_size, pp_size``.

    Raises:
        TypeError: there are too many, or one is given both by position and by name.
    """
    parameters = list(inspect.signature(HybridParallelPlugin.__init__).parameters)[3:]
    if len(args) > len(parameters):
        raise TypeError(
            f"{len(args)} positional arguments after tp_size and pp_size, but the plugin has {len(parameters)}"
        )
    by_place = dict(zip(parameters, args, strict=False))
    repeated = sorted(by_place.keys() & kwargs)
    if repeated:
        raise TypeError(f"got multiple values for argument {repeated[0]!r}")
    return by_place | kwargs


def arguments_from_plan(plan: Plan, replica: Replica, given: Mapping[str, Any]) -> dict[str, Any]:
    """The plugin's arguments that run a ``replica`` of ``plan``: those in ``given`` and those that follow.

    A plan in ZeRO stage 0 says nothing about it: with another stage its devices need less memory.

    Args:
        plan: the plan.
        replica: one of its replicas.
        given: arguments of the script. Their ``microbatch_size`` is that of the plan.

    Raises:
        ValueError: an argument in ``given`` contradicts the plan.
    """
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
    """Raise ValueError unless the ranks can be divided into tensor-parallel groups and pipeline stages."""
    world = dist.get_world_size()
    for name, size in (("tp_size", tp_size), ("pp_size", pp_size)):
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if world % (tp_size * pp_size) != 0:
        raise ValueError(
            f"{world} ranks cannot be divided by tp_size={tp_size} × pp_size={pp_size}; "
            f"start a multiple of {tp_size * pp_size} ranks, or choose sizes whose product divides {world}"
        )


def check_uneven_batches(batches: BatchConfig, plugin: HybridParallelPlugin) -> None:
    """Raise ValueError if global batches cannot be divided unevenly with the plugin's other arguments."""
    if plugin.sp_size > 1:
        raise ValueError(
            f"batches cannot be combined with sp_size={plugin.sp_size}: gradients are averaged over parts of sequences "
            "too; use sp_size=1, or leave batches out"
        )
    if batches.accumulation == "per_rank" and plugin.zero_stage > 1:
        raise ValueError(
            f'accumulation="per_rank" needs zero_stage 0 or 1, not {plugin.zero_stage}, which synchronizes at every '
            'micro-batch; use accumulation="shared"'
        )


@contextmanager
def zero_in_fp32(plugin: HybridParallelPlugin) -> Iterator[None]:
    """Let ``configure`` of Colossal-AI's ``plugin`` accept ZeRO in fp32.

    It refuses that, although its optimizer can do it: ``LowLevelZeroPlugin`` offers it. Where ``configure`` hands the
    precision on, only "fp16" and "bf16" matter.
    """
    precision = plugin.precision
    if precision == "fp32" and plugin.zero_stage:
        plugin.precision = "float32"
    try:
        yield
    finally:
        plugin.precision = precision
