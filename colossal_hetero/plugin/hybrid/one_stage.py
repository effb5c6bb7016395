"""``execute_pipeline`` for a model that is not cut into stages: micro-batch after micro-batch, on every rank.

With it a training loop does not depend on whether a plan has a pipeline. What it returns and refuses is that of
Colossal-AI's 1F1B schedule, of which it is the case of one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
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
from torch import Tensor
from torch.utils._pytree import tree_map

from ...accelerator import get_accelerator
from ...io.text import count
from ...layers.timm_vit import inputs_of

__all__ = ["OneStageSchedule"]


class OneStageSchedule:
    """Runs the forward and backward passes of a replica's batch, and accumulates their gradients.

    Gradients are summed over replicas in the last backward pass, unless ``without_sync`` is None.

    Args:
        num_microbatches: micro-batches in a batch to train with; None to divide by ``microbatch_size``.
        microbatch_size: samples in a micro-batch, if ``num_microbatches`` is None. If both are None, a batch is one
            micro-batch.
        without_sync: a context in which the backward pass of a model and its optimizer does not sum gradients over
            replicas; None if every backward pass must.
    """

    def __init__(
        self,
        num_microbatches: int | None,
        microbatch_size: int | None,
        without_sync: Callable[[ModelWrapper, OptimizerWrapper], AbstractContextManager[Any]] | None,
    ) -> None:
        self._count = num_microbatches
        self._size = microbatch_size
        self._without_sync = without_sync
        self.num_microbatches = 0
        """Micro-batches of the batch that runs."""

    def forward_backward_step(
        self,
        model: ModelWrapper,
        data_iter: Iterator[Any],
        criterion: Callable[[Any, Any], Tensor],
        optimizer: OptimizerWrapper | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Train on the next batch of ``data_iter``, or evaluate it if gradients are switched off.

        Returns:
            ``loss``: fp32, ``[]``, the mean of the micro-batches' losses, or None; ``outputs``: the model's outputs for
            the whole batch, or None.

        Raises:
            ValueError: the batch cannot be divided into micro-batches, or there is nothing to run backward passes with.
        """
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
