"""The arguments of Colossal-AI's hybrid plugin: by name, from a plan, and whether they fit the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.pipeline.schedule._utils import (
    detach,
    get_batch_size,
    get_micro_batch,
    merge_batch,
    model_forward,
    to_device,
    tree_map_hf,
)
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...colossalai_support.accelerator import get_accelerator
from ...colossalai_support.corrections import replaced
from ...common.methods import check_names
from ...common.text import count
from ...data_parallel.config import BatchConfig
from ...layers.timm_vit import inputs_of
from ...planner.cost.pass_order import zero_bubble_nodes
from ...planner.cost.plan import Plan, Replica


def check_spelling(plugin: type, arguments: Mapping[str, Any]) -> None:
    """Check that ``plugin`` or Colossal-AI's has all these arguments."""
    known = [name for kind in (plugin, HybridParallelPlugin) for name in inspect.signature(kind).parameters]
    check_names(plugin.__name__, arguments, [name for name in known if name not in ("args", "kwargs")])


def arguments_by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of Colossal-AI's plugin by name; ``args`` are the positional ones after ``tp_size, pp_size``."""
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


# One stage -----------------------------------------------------------------------------------------------------------
# ``execute_pipeline`` for a model that is not cut into stages, so that a training loop fits any plan. It returns and
# refuses what Colossal-AI's 1F1B schedule does, of which it is the case of one stage.


class OneStageSchedule:
    """Runs the forward and backward passes of a replica's batch, and accumulates their gradients; they are summed over
    replicas in the last backward pass, unless ``without_sync`` is None."""

    def __init__(
        self,
        num_microbatches: int | None,
        microbatch_size: int | None,
        without_sync: Callable[[ModelWrapper, OptimizerWrapper], AbstractContextManager[Any]] | None,
    ) -> None:
        self._count = num_microbatches
        self._size = microbatch_size
        self._without_sync = without_sync
        self.num_microbatches = 0  # of the batch that runs

    def forward_backward_step(
        self,
        model: ModelWrapper,
        data_iter: Iterator[Any],
        criterion: Callable[[Any, Any], Tensor],
        optimizer: OptimizerWrapper | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Train on the next batch, or evaluate it if gradients are switched off. Returns ``loss``: fp32, ``[]``, the
        mean over micro-batches, or None; ``outputs``: those of the model for the whole batch, or None."""
        training = torch.is_grad_enabled()
        if training and optimizer is None:
            raise ValueError("give execute_pipeline the optimizer, or evaluate inside torch.no_grad()")
        device = get_accelerator().get_current_device()
        batch = next(data_iter)
        samples = get_batch_size(batch)
        size = self._micro_batch_size(samples, training)
        starts = range(0, samples, size)
        self.num_microbatches = len(starts)
        total = torch.zeros((), device=device) if return_loss else None
        outputs: list[Any] = []
        for start in starts:
            micro_batch = tree_map(lambda each: to_device(each, device), get_micro_batch(batch, start, size))
            waits = training and self._without_sync is not None and start != starts[-1]
            with self._without_sync(model, optimizer) if waits else nullcontext():  # type: ignore[misc, arg-type]
                output = model_forward(model, inputs_of(model.unwrap(), micro_batch), None)
                loss = criterion(output, micro_batch) / len(starts)
                if optimizer is not None and training:
                    optimizer.backward(loss)
            if total is not None:
                total += loss.detach()
            if return_outputs:
                outputs.append(tree_map_hf(detach, output))
        axis = getattr(model.unwrap(), "batch_size_dim", 0)
        return {"loss": total, "outputs": merge_batch(outputs, axis) if return_outputs else None}

    def _micro_batch_size(self, samples: int, training: bool) -> int:
        """Samples in each micro-batch; in evaluation the last one may be smaller."""
        divisor = self._count or self._size or 1
        if training and samples % divisor != 0:
            parts = f"{self._count} micro-batches" if self._count else f"micro-batches of {self._size}"
            raise ValueError(
                f"a batch of {count(samples, 'sample')} cannot be divided into {parts} of equal size; "
                f"use a batch size that is a multiple of {divisor}, and drop_last=True"
            )
        return -(-samples // self._count) if self._count else self._size or samples
