"""The passes of a batch in the hybrid plugin: in a pipeline or in one stage, to train or to evaluate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.pipeline.schedule import InterleavedSchedule, ZeroBubbleVPipeScheduler
from colossalai.pipeline.schedule._utils import (
    detach,
    get_batch_size,
    get_micro_batch,
    merge_batch,
    model_forward,
    to_device,
    tree_map_hf,
)
from colossalai.shardformer.policies.base_policy import Policy
from colossalai.shardformer.shard.utils import set_tensors_to_none
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...colossalai_support.accelerator import get_accelerator
from ...colossalai_support.corrections import replaced
from ...common.text import count
from ...data_parallel.config import BatchConfig
from ...data_parallel.unsummed_steps import noted_passes, refuse_unsummed_steps
from ...layers.timm_vit import inputs_of
from ...profiling.training_step import with_dicts
from ..elastic.elastic_run import ElasticRun
from ..replicas.unequal_replicas import UnequalReplicas
from ..training_objects import TrainingObjects
from ..uneven_batches import PipelineBatches, UnevenBatches
from ..zero.overlapped_optimizer import summing_in_passes
from .layer_balancing import LayerBalancing
from .live_plan import LivePlan
from .planned_run import PlannedRun


class OneStageSchedule:
    """Colossal-AI's 1F1B schedule for a model that is not cut into stages: it returns and refuses the same, so that a
    training loop fits any plan. Gradients of a replica's batch accumulate, and are summed over replicas in the last
    backward pass, unless ``without_sync`` is None."""

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
                output, loss = self.forward_step(model, micro_batch, criterion)
                if optimizer is not None and training:
                    self.backward_step(optimizer, loss)
            if total is not None:
                total += loss.detach()
            if return_outputs:
                outputs.append(tree_map_hf(detach, output))
        axis = getattr(model.unwrap(), "batch_size_dim", 0)
        return {"loss": total, "outputs": merge_batch(outputs, axis) if return_outputs else None}

    # Methods of their own, as in Colossal-AI's schedules, so that both can be timed alike.

    def forward_step(
        self, model: ModelWrapper, micro_batch: Any, criterion: Callable[[Any, Any], Tensor]
    ) -> tuple[Any, Tensor]:
        output = model_forward(model, inputs_of(model.unwrap(), micro_batch), None)
        return output, criterion(output, micro_batch) / self.num_microbatches

    def backward_step(self, optimizer: OptimizerWrapper, loss: Tensor) -> None:
        optimizer.backward(loss)

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


class PassesPlugin(HybridParallelPlugin):
    """Runs the passes of batches, and refuses steps on gradients that are not summed."""

    batches: BatchConfig | None
    _balancing: LayerBalancing
    _elastic: ElasticRun | None
    _live: LivePlan | None
    _planned: PlannedRun | None
    _unequal: UnequalReplicas | None
    _uneven_batches: UnevenBatches | None
    _one_stage: OneStageSchedule

    def _make_one_stage(self, arguments: Mapping[str, Any]) -> OneStageSchedule:
        micro_batches = arguments.get("num_microbatches"), arguments.get("microbatch_size")
        if self.batches is not None:
            micro_batches = None, None  # the data loader gives micro-batches
        elif self._planned is not None:
            micro_batches = None, self._planned.plan.micro_batch
        # ZeRO stage 2 divides gradients among ranks after every backward pass, so it must sum them every time.
        return OneStageSchedule(*micro_batches, None if self.zero_stage == 2 else self.no_sync)

    @property
    def _is_idle(self) -> bool:
        return self._planned is not None and self._planned.is_idle

    def is_last_stage(self) -> bool:
        """True if this rank has the loss: with the last chunk of the model, or without a pipeline, where
        ``stage_manager`` is None. No rank has it that the plan leaves idle."""
        if self.stage_manager is None:
            return not self._is_idle
        # In the zero-bubble schedule, the chunks go down the stages and up again.
        name = "is_first_stage" if self.stage_manager.use_zbv else "is_last_stage"
        return bool(getattr(self.stage_manager, name)(ignore_chunk=True))

    def execute_pipeline(
        self, data_iter: Iterator, model: ModelWrapper, criterion: Callable, *args: Any, **kwargs: Any
    ) -> dict:
        """See ``PipelinePluginBase.execute_pipeline``; called by ``Booster.execute_pipeline``. Without a pipeline,
        every rank accumulates the gradients of its batch, divided into micro-batches as the plan, ``num_microbatches``
        or ``microbatch_size`` say (not divided without them), and has the loss. Batches that are mappings reach the
        model and ``criterion`` as dicts.

        Raises:
            TypeError: ``data_iter`` is no iterator.
            ValueError: the batch has another size than the plan, or without a pipeline cannot be divided; or gradients
                are switched off, and the schedule cannot evaluate the batch.
        """
        if not isinstance(data_iter, Iterator):
            raise TypeError(
                f"execute_pipeline takes an iterator, as iter(dataloader), not a {type(data_iter).__name__}"
            )

        def execute(batches: Iterator) -> dict:
            return self._execute(batches, model, criterion, *args, **kwargs)

        data_iter = map(with_dicts, data_iter)
        if self._elastic is None:
            if self._live is not None and torch.is_grad_enabled():
                self._live.before_passes()
            return execute(data_iter)
        if torch.is_grad_enabled():
            return self._elastic.run(functools.partial(execute, data_iter))
        return self._elastic.evaluate(model, data_iter, execute)

    def _execute(self, batches: Iterator, model: ModelWrapper, criterion: Callable, *args: Any, **kwargs: Any) -> dict:
        if self._planned is not None and self._is_idle:
            next(batches)
            if torch.is_grad_enabled():
                self._balancing.begin_idle_iteration()
                optimizer: Any = args[0] if args else kwargs.get("optimizer")
                if hasattr(optimizer, "mixed_precision"):  # which scales gradients back only after backward passes
                    optimizer.mixed_precision.pre_backward_by_grad(None, None)
                self._planned.after_passes()
            return {"loss": None, "outputs": None}
        if not torch.is_grad_enabled():
            return self._evaluate(batches, model, criterion, *args, **kwargs)
        if self._planned is not None and self._uneven_batches is None:
            batches = self._planned.checked_batches(batches)

        def run_passes(batches: Iterator, criterion: Callable) -> dict:
            return self._run_passes(batches, model, criterion, *args, **kwargs)

        if isinstance(self._uneven_batches, PipelineBatches):
            schedule = self.scheduler or self._one_stage
            result = self._uneven_batches.run(schedule, run_passes, batches, criterion)
        else:
            result = run_passes(batches, criterion)
        if self._planned is not None:
            self._planned.after_passes()
        return result

    def _evaluate(self, batches: Iterator, model: ModelWrapper, criterion: Callable, *args: Any, **kwargs: Any) -> dict:
        if self.scheduler is None:
            return self._one_stage.forward_backward_step(model, batches, criterion, *args, **kwargs)
        if isinstance(self.scheduler, ZeroBubbleVPipeScheduler):
            raise ValueError(
                "Colossal-AI's zero-bubble schedule cannot evaluate; save the model, and evaluate it with another "
                "schedule"
            )
        if self._planned is not None:
            batches = self._planned.batches_to_evaluate(batches)
        # Without gradients there is nothing to synchronize, and the gradients of weights that stages share may be None
        # since the last step.
        with model.no_sync(), nullcontext() if self._planned is None else training_sizes_kept(self.scheduler):
            return super().execute_pipeline(batches, model, criterion, *args, **kwargs)

    def _run_passes(
        self, batches: Iterator, model: ModelWrapper, criterion: Callable, *args: Any, **kwargs: Any
    ) -> dict:
        """Train on a batch of this replica, with the sums that belong to its passes."""
        optimizer: Any = args[0] if args else kwargs.get("optimizer")
        if self._unequal is None:
            if self.scheduler is None:
                return self._one_stage.forward_backward_step(model, batches, criterion, *args, **kwargs)
            with noted_passes(model, optimizer), summing_in_passes(self.scheduler, optimizer):
                return super().execute_pipeline(batches, model, criterion, *args, **kwargs)
        schedule = self.scheduler or self._one_stage
        sums = model.require_grad_sync and getattr(optimizer, "require_grad_sync", True)
        with model.gradients.sums.passes((lambda: schedule.num_microbatches) if sums else None):
            if self.scheduler is not None:
                return super().execute_pipeline(batches, model, criterion, *args, **kwargs)
            result = self._one_stage.forward_backward_step(model, batches, criterion, *args, **kwargs)
            if sums:  # after the passes, which are timed: a rank waits for others here
                (optimizer if self.zero_stage else model).sync_dp_grads()
        return result

    def micro_batch_place(self, number: int) -> tuple[int, int]:
        """First sample and number of samples of this rank's micro-batch ``number`` in the current global batch."""
        assert self._planned is not None and isinstance(self._uneven_batches, PipelineBatches)
        return self._uneven_batches.first_sample(number), self._planned.plan.micro_batch

    def _refuse_unsummed_steps(self, model: ModelWrapper, optimizer: OptimizerWrapper) -> None:
        """Refuse steps on gradients that are not summed, where uneven batches or unequal pipelines do not do it."""
        in_pipeline, counted_again = self.scheduler is not None, None
        checks_itself = self._unequal if in_pipeline else self.batches
        sums = self.dp_size > 1 or self.zero_stage or self.enable_sequence_parallelism or model.shared_params
        if checks_itself is not None or not sums:
            return
        if not self.zero_stage and self._unequal is None:
            # Colossal-AI adds up these gradients over ranks after each pass; means of means stay the same.
            if self.enable_sequence_parallelism and self.sequence_parallelism_mode in ("split_gather", "ring"):
                counted_again = f"sequence parallelism ({self.sequence_parallelism_mode})"
            elif model.shared_params:
                counted_again = "weights that pipeline stages share"
        in_shards = bool(self.zero_stage) and self._unequal is None
        refuse_unsummed_steps(
            model, optimizer, in_pipeline=in_pipeline, in_shards=in_shards, counted_again=counted_again
        )


class _NoLayers(Policy):
    """The policy of a rank that the plan leaves idle: it holds no layer, like a stage whose layers others have."""

    def config_sanity_check(self) -> None: ...

    def preprocess(self) -> nn.Module:
        return self.model

    def module_policy(self) -> dict[Any, Any]:
        return {}

    def postprocess(self) -> nn.Module:
        set_tensors_to_none(self.model)
        return self.model


@contextmanager
def no_layers(plugin: HybridParallelPlugin, objects: TrainingObjects) -> Iterator[None]:
    """Let ``plugin`` configure a rank without layers, whose optimizer has no parameters."""
    for group in objects.optimizer.param_groups:
        group["params"] = []
    with replaced(plugin, custom_policy=_NoLayers()):
        yield


def training_sizes_kept(schedule: object) -> AbstractContextManager[None]:
    """Let a 1F1B or interleaved schedule evaluate batches of another size, and train on as before. It would train with
    the number of micro-batches of the last evaluation, and asserts that all batches are as large as the last one."""
    number = "num_microbatch" if isinstance(schedule, InterleavedSchedule) else "num_microbatches"
    sizes = (number, "microbatch_size", "batch_size", "last_batch_size", "enable_metadata_cache")
    shapes = ("send_tensor_metadata", "send_grad_metadata", "tensor_metadata_recv", "grad_metadata_recv")
    return replaced(schedule, **{name: getattr(schedule, name) for name in (*sizes, *shapes)})
