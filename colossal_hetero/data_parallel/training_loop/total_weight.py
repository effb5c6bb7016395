"""The weight of each micro-batch's loss in its global batch; see accumulation.py, [Note: weights of micro-batches]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...accelerator import get_accelerator
from ...profiling.aborted_step import find_zero_optimizer
from .micro_batch import MicroBatch

__all__ = ["CountedTotal", "SampleTotal", "TotalWeight"]


class TotalWeight(Protocol):
    """Weighs losses by their part of the global batch."""

    is_estimated: bool
    """Whether the gradients so far are to be corrected."""

    def weighted(self, loss: Tensor, micro_batch: MicroBatch) -> Tensor:
        """``loss``, the mean over a micro-batch, times its weight."""

    def correct(self, optimizer: Any) -> None:
        """Correct the gradients before the step of a global batch, if the weights were estimated."""

    def forget(self) -> None:
        """The gradients so far were dropped."""


class SampleTotal:
    """Weights by samples, whose number in a global batch is known in advance.

    Args:
        ranks: number of ranks that gradients are averaged over.
    """

    is_estimated = False

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def weighted(self, loss: Tensor, micro_batch: MicroBatch) -> Tensor:
        return loss * (micro_batch.samples * self._ranks / micro_batch.global_samples)

    def correct(self, optimizer: Any) -> None:
        pass

    def forget(self) -> None:
        pass


class CountedTotal:
    """Weights by what a function counts in each batch, such as tokens.

    If every rank has one micro-batch in a global batch, the counts are summed over the ranks before the backward pass.
    Otherwise losses are divided by an estimate, the same on all ranks, and gradients are corrected before the step.

    Args:
        ranks: number of ranks that gradients are averaged over, i.e. replicas of the model.
        model: the boosted model.
        equal_steps: whether all ranks have equally many micro-batches in every global batch.
    """

    def __init__(self, ranks: int, model: nn.Module, *, equal_steps: bool) -> None:
        self._ranks = ranks
        self._model = model
        self._equal_steps = equal_steps
        self._per_sample: float | None = None
        """Estimated count of a sample; None before the first global batch."""
        self._divisor = 1.0
        self._uncorrected = 0.0
        """Sum of this rank's counts in an incomplete global batch."""
        self.is_estimated = False
        self._samples = 1
        self._latest: MicroBatch | None = None
        self._corrected: MicroBatch | None = None

    def weighted(self, loss: Tensor, micro_batch: MicroBatch) -> Tensor:
        assert micro_batch.weight is not None
        if micro_batch is self._corrected:
            raise RuntimeError(
                "there is a backward pass of a global batch whose gradients were clipped already; clip them after the "
                "last backward pass"
            )
        if micro_batch is not self._latest:
            self._count(micro_batch, micro_batch.weight)
        if micro_batch.weight == 0:
            # The mean over nothing is not a number, and neither is its product with zero.
            return loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        return loss * (micro_batch.weight * self._ranks / self._divisor)

    def correct(self, optimizer: Any) -> None:
        if not self.is_estimated:
            return
        (total,) = self._sum_over_replicas(self._uncorrected)
        if total > 0:
            if total != self._divisor:
                for gradient in _gradients(self._model, optimizer):
                    gradient.mul_(self._divisor / total)
            self._per_sample = total / self._samples
        latest = self._latest
        self.forget()
        self._corrected = latest

    def forget(self) -> None:
        self._uncorrected, self.is_estimated, self._latest, self._corrected = 0.0, False, None, None

    def _count(self, micro_batch: MicroBatch, weight: float) -> None:
        """Count a micro-batch, and set what the losses of its global batch are divided by."""
        self._latest = micro_batch
        if self._equal_steps and micro_batch.step == 0 and micro_batch.is_last:
            (total,) = self._sum_over_replicas(weight)
            self._divisor = total or 1.0
            return
        if micro_batch.step == 0:
            if self.is_estimated:
                raise RuntimeError(
                    "the gradients of several global batches are accumulated, but the sum of weights (weight_by) of "
                    "each is known only after its last micro-batch; step after every global batch, or make "
                    "global_batch_size small enough for one micro-batch per rank"
                )
            if self._per_sample is None:
                total, samples = self._sum_over_replicas(weight, micro_batch.samples)
                self._per_sample = total / samples if total > 0 else 1.0
            self._divisor = self._per_sample * micro_batch.global_samples
            self.is_estimated, self._samples = True, micro_batch.global_samples
        self._uncorrected += weight

    def _sum_over_replicas(self, *values: float) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64, device=get_accelerator().get_current_device())
        dist.all_reduce(sums)
        # All ranks of a replica have the same values.
        return (sums * self._ranks / dist.get_world_size()).tolist()


def _gradients(model: nn.Module, optimizer: Any) -> Iterator[Tensor]:
    """This rank's gradients, which the optimizer is about to use."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield parameter.grad
    zero = find_zero_optimizer(optimizer)
    for store in () if zero is None else zero.pg_to_grad_store.values():
        for slices in store._grads_of_params.values():
            for parts in slices.values():
                yield from parts
