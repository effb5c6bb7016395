"""What a plan means for Colossal-AI's plugin: who agrees on it, whether it can be run, and as which arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from colossalai.booster.plugin import HybridParallelPlugin
from rich.console import Console
from torch import nn
from torch.utils._pytree import tree_leaves

from ...data_parallel.config import BatchConfig
from ...io.text import spans
from ...pipeline_parallel.config import PlanConfig
from ...planner.cluster.cluster_file import load_cluster
from ...planner.cluster.topology import Topology
from ...planner.plans.plan import Plan, load_plan
from ...planner.plans.runnable import why_not_runnable
from ...planner.profile.layer_profile import ModelProfile, load_model_profile
from ...profiling.layers.model_layers import find_block_row

__all__ = ["agree_on_plan", "arguments_of", "check_loader", "check_num_layers", "runnable", "sized_batches"]


# Which plan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreed:
    """What all ranks go by."""

    plan: Plan
    """With ranks numbered as the cluster's devices."""
    topology: Topology | None
    profile: ModelProfile | None


def agree_on_plan(
    plan: Plan | str | Path, planning: PlanConfig, tp_size: int | None = None, pp_size: int | None = None
) -> Agreed:
    """The plan that all ranks run, rank 0's, and the cluster and profile in ``planning`` where they are given.

    Rank 0 alone reads files and plans, so only it needs the files. Called by all ranks.

    Raises:
        TypeError: ``plan`` is something else.
        ValueError: on every rank, what rank 0 could not read or plan, or that another rank was given another plan.
    """
    if not isinstance(plan, Plan | str | Path):
        raise TypeError(f'plan={plan!r} is neither a Plan, nor the path of a plan file, nor "auto"')
    found: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            found[0] = _find(plan, planning, tp_size, pp_size)
        except Exception as error:
            # Whatever it is, the others wait for rank 0's word.
            failure, found[1] = error, str(error)
    dist.broadcast_object_list(found)
    agreed, error_text = found
    if error_text is not None:
        raise failure or ValueError(error_text)
    if isinstance(plan, Plan):
        others: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(others, plan == agreed.plan)
        if not all(others):
            raise ValueError(
                f"ranks {', '.join(str(rank) for rank, same in enumerate(others) if not same)} were given other plans "
                "than rank 0; give all ranks the same plan"
            )
    return agreed


def _find(plan: Plan | str | Path, planning: PlanConfig, tp_size: int | None, pp_size: int | None) -> Agreed:
    topology, profile = planning.cluster, planning.profile
    if isinstance(topology, str | Path):
        topology = load_cluster(topology)
    if isinstance(profile, str | Path):
        profile = load_model_profile(profile)
    if not isinstance(plan, Plan):
        auto = plan == "auto"
        plan = _make(planning, topology, profile, tp_size, pp_size) if auto else load_plan(plan)
    return Agreed(plan, topology, profile)


def _make(
    planning: PlanConfig,
    topology: Topology | None,
    profile: ModelProfile | None,
    tp_size: int | None,
    pp_size: int | None,
) -> Plan:
    """The best plan that can be run here; with these sizes where they are given."""
    from ...planner.report.plan_table import one_line
    from ...planner.search.make_plans import make_plans

    global_batch = planning.global_batch_size
    if topology is None or profile is None or global_batch is None:
        raise ValueError(
            'plan="auto" needs planning=PlanConfig(cluster=…, profile=…, global_batch_size=…), not '
            f"cluster={planning.cluster!r}, profile={planning.profile!r}, global_batch_size={global_batch!r}"
        )
    world = dist.get_world_size()
    if len(topology.devices) != world:
        raise ValueError(
            f"the cluster has {len(topology.devices)} devices, but {world} ranks were started; start one rank per "
            "device, in the order of the cluster file, or describe the devices that are in use"
        )
    ranked = make_plans(
        topology,
        profile,
        global_batch=global_batch,
        micro_batches=planning.micro_batch_sizes,
        tensor_parallel=None if tp_size is None else [tp_size],
        stages=None if pp_size is None else [pp_size],
        method=planning.method,
        runnable=True,
        all_devices=True,
        keep=1,
    )
    plan = ranked[0].plan
    Console(stderr=True).print(one_line(plan), soft_wrap=True, highlight=False, markup=False)
    return plan


# Whether it can be run -------------------------------------------------------------------------------------------


def runnable(plan: Plan) -> Plan:
    """``plan`` with ranks as launched, so ordered that rank 0 is in the first replica, and there first in its group.

    Ranks are those that the plan uses, 0 … ``world_size`` − 1 in the order of the cluster file. Colossal-AI lets the
    first replica and the first rank of groups write checkpoints, and rank 0 what belongs to no group; both must be the
    same. Replicas that are cut alike may change places, and so may the ranks of a group.

    Raises:
        ValueError: the plan is for another number of ranks or leaves devices idle, its replicas are not alike, or they
            have fewer micro-batches than stages.
    """
    problem = why_not_runnable(plan, dist.get_world_size())
    if problem is not None:
        raise ValueError(problem)
    replicas = []
    for replica, order in zip(plan.replicas, plan.launched_order, strict=True):
        stages = (
            # False sorts before True, and sorting moves nothing else.
            stage.model_copy(update={"ranks": tuple(sorted(ranks, key=bool))})
            for stage, ranks in zip(replica.stages, order, strict=True)
        )
        replicas.append(replica.model_copy(update={"stages": tuple(stages)}))
    replicas.sort(key=lambda replica: all(0 not in stage.ranks for stage in replica.stages))
    return plan.model_copy(update={"replicas": tuple(replicas)})


# As which arguments ----------------------------------------------------------------------------------------------


def arguments_of(plan: Plan, given: Mapping[str, Any]) -> dict[str, Any]:
    """The plugin's arguments that run ``plan``: those in ``given`` and those that follow from the plan.

    Raises:
        ValueError: an argument in ``given`` says something else than the plan.
    """
    pp_size, micro_batches = len(plan.layers_per_stage), plan.replicas[0].micro_batches
    follows: dict[str, Any] = dict(tp_size=plan.tensor_parallel, pp_size=pp_size)
    only_pipelines = dict(
        pp_style="1f1b",
        num_layers_per_stage=list(plan.layers_per_stage),
        microbatch_size=plan.micro_batch,
        num_microbatches=micro_batches,
        num_model_chunks=1,
    )
    for name, planned in (follows | only_pipelines | {"sp_size": 1}).items():
        value = given.get(name)
        if name == "num_layers_per_stage" and value is not None:
            value = list(value)
        if value is not None and value != planned:
            raise ValueError(f"{name}={value!r} contradicts the plan, which has {planned!r}; leave it out")
    return {**given, **follows, **(only_pipelines if pp_size > 1 else {})}


def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of Colossal-AI's plugin by name; ``args`` are those behind ``tp_size`` and ``pp_size``.

    Raises:
        TypeError: there are too many, or one is given twice.
    """
    parameters = list(inspect.signature(HybridParallelPlugin.__init__).parameters)[3:]
    if len(args) > len(parameters):
        raise TypeError(f"{len(args)} positional arguments behind tp_size and pp_size; there are {len(parameters)}")
    by_place = dict(zip(parameters, args, strict=False))
    twice = sorted(by_place.keys() & kwargs)
    if twice:
        raise TypeError(f"got multiple values for argument {twice[0]!r}")
    return by_place | kwargs


# What is trained -------------------------------------------------------------------------------------------------


class _StageManager(Protocol):
    distribute_layers: Callable[..., list[int]]


def check_num_layers(stage_manager: _StageManager, plan: Plan) -> None:
    """Let ``stage_manager`` say what is wrong when it is to divide another number of blocks than ``plan``'s.

    Every policy asks it, as a model is boosted; Colossal-AI's own answer is a bare assertion.
    """
    distribute = stage_manager.distribute_layers

    def distribute_layers(num_layers: int, *args: Any, **kwargs: Any) -> list[int]:
        if num_layers != plan.blocks:
            raise ValueError(other_model(plan, num_layers))
        return distribute(num_layers, *args, **kwargs)

    stage_manager.distribute_layers = distribute_layers


def other_model(plan: Plan, num_layers: int) -> str:
    """That a model of ``num_layers`` blocks is not the plan's."""
    return (
        f"the plan divides {plan.blocks} blocks of {plan.model} into {list(plan.layers_per_stage)}, but the model has "
        f"{num_layers} blocks; plan with a profile of this model"
    )


def check_blocks(model: nn.Module, plan: Plan) -> None:
    """Raise ``ValueError`` if ``model`` has another number of blocks than ``plan``, where they can be told."""
    try:
        num_layers = len(find_block_row(model).blocks)
    except ValueError:
        return
    if num_layers != plan.blocks:
        raise ValueError(other_model(plan, num_layers))


def check_batches(plan: Plan, batches: BatchConfig) -> None:
    """Raise ``ValueError`` if global batches that are divided unevenly are not the plan's."""
    if batches.global_batch_size != plan.global_batch:
        raise ValueError(
            f"global_batch_size={batches.global_batch_size} in batches contradicts the plan, which has "
            f"{plan.global_batch}; use the same, or plan for the other"
        )


def check_lora(plan: Plan) -> None:
    """Raise ``ValueError`` if LoRA's adapters could not be saved."""
    ranks = sorted(plan.rank_order[0][0])
    if 0 not in ranks:
        raise ValueError(
            f"LoRA adapters are saved by rank 0, which must be in the first stage, but that has rank {spans(ranks)}; "
            "launch the ranks in the order of the plan's stages, or train without LoRA"
        )


def check_loader(plan: Plan, batch_size: int | None) -> None:
    """Raise ``ValueError`` if a loader of that many samples per replica does not fit ``plan``; None: not known."""
    valid = valid_batches(plan)
    if batch_size is not None and batch_size not in valid:
        raise ValueError(wrong_batch(plan, batch_size))


def valid_batches(plan: Plan) -> tuple[int, ...]:
    """Samples of a replica's batch. Without a pipeline, who accumulates gradients hands out micro-batches."""
    whole = plan.micro_batch * plan.replicas[0].micro_batches
    return (whole,) if len(plan.layers_per_stage) > 1 else (whole, plan.micro_batch)


def wrong_batch(plan: Plan, batch_size: int) -> str:
    """That a replica's batch of ``batch_size`` samples is not what was planned for."""
    return (
        f"a batch of {batch_size} samples does not fit the plan: each of its {len(plan.replicas)} replicas takes "
        f"{plan.replicas[0].micro_batches} micro-batches of {plan.micro_batch}; use "
        f"batch_size={' or '.join(map(str, valid_batches(plan)))} (and drop_last=True)"
    )


@contextmanager
def sizes_kept(schedule: object) -> Iterator[None]:
    """Let a 1F1B schedule evaluate batches of another size, and train on as before.

    It takes the number of micro-batches of what it evaluates for that of training, and asserts that all batches are as
    large as the last one.
    """
    sizes = ("num_microbatches", "microbatch_size", "batch_size", "last_batch_size")
    shapes = ("send_tensor_metadata", "send_grad_metadata", "tensor_metadata_recv", "grad_metadata_recv")
    before = {name: getattr(schedule, name) for name in (*sizes, "enable_metadata_cache", *shapes)}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(schedule, name, value)


def sized_batches(batches: Iterator[Any], plan: Plan) -> Iterator[Any]:
    """``batches``, checked: a ``ValueError`` for one that is not as large as planned."""
    for batch in batches:
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        if tensors and len(tensors[0]) not in valid_batches(plan):
            raise ValueError(wrong_batch(plan, len(tensors[0])))
        yield batch
