"""Gradient accumulation over uneven micro-batches, with exact gradients and an unchanged training loop.

The training loop calls forward, loss, ``booster.backward``, ``optimizer.step`` and ``zero_grad`` for every micro-batch
of the loader. Between the micro-batches of one global batch, ``step``, ``zero_grad``, gradient clipping and the
learning-rate schedules of the optimizer do nothing, so that the optimizer steps once per global batch. Which
micro-batch a pass belongs to follows from the tensors (tagged_tensor.py), and what would train to other weights is
refused (progress.py).

[Note: weights of micro-batches]
Data parallelism averages gradients over R ranks. The loss of a micro-batch is a mean over parts that count w together,
usually its samples. It is multiplied by ``w · R / W``, where W is the sum of w over the global batch. Summed over
micro-batches and averaged over ranks, the gradient is then the mean over the global batch for every division. A rank
without samples runs one sample with weight zero, because the other ranks wait for it in the collectives. If W is not
known in advance, such as the number of tokens, an estimate takes its place, and the sums are corrected before the step
(total_weight.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ..profiling.preserved_state import inner_optimizer
from .loader import HeteroDataLoader
from .training_loop.micro_batch import MicroBatch
from .training_loop.progress import LoopProgress
from .training_loop.schedules import averages_of, schedules_of, step_with_optimizer, update_with_optimizer
from .training_loop.tagged_tensor import micro_batches_of, share_of_samples, untagged
from .training_loop.total_weight import TotalWeight

__all__ = ["GradientAccumulation"]


class GradientAccumulation:
    """Makes a model, its optimizer and its schedules accumulate gradients over the micro-batches of each global batch.

    Args:
        loader: loader of the micro-batches.
        synchronize: called before each forward pass with whether its gradients are to be summed over ranks.
        total: gives each loss its weight, and corrects the gradients if the weights were estimated.
        max_norm: gradients are clipped to this norm before each step; 0: no clipping.
        on_step: called after each real optimizer step, i.e. once per global batch.
    """

    def __init__(
        self,
        loader: HeteroDataLoader,
        synchronize: Callable[[bool], None],
        total: TotalWeight,
        *,
        max_norm: float = 0.0,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._loader = loader
        self._synchronize = synchronize
        self._total = total
        self._max_norm = max_norm
        self._on_step = on_step
        self._drop_gradients: Callable[[], None] = lambda: None
        self._param_groups: list[dict[str, Any]] = []
        self._rates: list[Any] = []
        self._may_synchronize = self._is_synchronized = True
        self._knows_schedules = False
        self.progress = LoopProgress()

    @property
    def within_global_batch(self) -> bool:
        """Whether there are gradients of an incomplete global batch."""
        return self.progress.is_within_global_batch

    def attach(self, model: ModelWrapper, optimizer: OptimizerWrapper, lr_scheduler: LRScheduler | None) -> None:
        """Replace the methods that a training loop calls. Call it once, on objects that a plugin has configured."""
        self._loader.follow(self.progress)
        self._model = model
        self._drop_gradients = optimizer.zero_grad
        self._param_groups = inner_optimizer(optimizer).param_groups
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        optimizer.backward = self._weighted(optimizer.backward)
        optimizer.step = self._stepping(optimizer, optimizer.step)
        optimizer.zero_grad = self._dropping(optimizer.zero_grad)
        for name in ("clip_grad_by_norm", "clip_grad_by_value", "unscale_grad"):
            setattr(optimizer, name, self._between_global_batches(getattr(optimizer, name)))
        if lr_scheduler is not None:
            step_with_optimizer(lr_scheduler, self.progress)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In the block, gradients are not summed over ranks where the stage allows that (0 and 1)."""
        self._may_synchronize = False
        try:
            yield
        finally:
            self._may_synchronize = True

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = [*args, *kwargs.values()]
        sources = micro_batches_of(given)
        args, kwargs = untagged(args), untagged(kwargs)
        # A model in evaluation mode may be trained, for example with frozen statistics.
        if torch.is_grad_enabled() and (model.training or sources):
            must_drop = self.progress.must_drop
            micro_batch = self.progress.forward(sources, share_of_samples(sources[0], given) if sources else 1.0)
            if micro_batch is not None:
                if must_drop and not self.progress.must_drop:
                    # The loop left a global batch before its end.
                    self._drop_gradients()
                    self._total.forget()
                self._check_rates(micro_batch)
                self._is_synchronized = self._may_synchronize
                self._synchronize(micro_batch.is_last and self._may_synchronize)
        return args, kwargs

    def _check_rates(self, micro_batch: MicroBatch) -> None:
        """Refuse learning rates that change within a global batch."""
        rates = [group.get("lr") for group in self._param_groups]
        if micro_batch.step == 0 or len(rates) != len(self._rates):
            self._rates = rates
        for old, new in zip(self._rates, rates, strict=True):
            # The value of a tensor is not read, because that would wait for the device.
            if not isinstance(new, Tensor) and old != new:
                raise RuntimeError(
                    f"the learning rate changed from {old} to {new} within a global batch, before micro-batch "
                    f"{micro_batch.step}: it would change as often as batches of the loader are drawn, not as often as "
                    "the optimizer steps. Pass the schedule to booster.boost, or change the rate where loader.is_last"
                )

    def _find_schedules(self, optimizer: OptimizerWrapper) -> None:
        """Find the schedules that were not passed to ``booster.boost``, when a step is left out for the first time."""
        if not self._knows_schedules:
            self._knows_schedules = True
            for schedule in schedules_of(optimizer):
                step_with_optimizer(schedule, self.progress)
            for average in averages_of(self._model):
                update_with_optimizer(average, self.progress)

    def _weighted(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def run(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            micro_batch = self.progress.backward(micro_batches_of(loss))
            return backward(self._total.weighted(untagged(loss), micro_batch), *args, **kwargs)

        return run

    def _stepping(self, optimizer: OptimizerWrapper, step: Callable[..., Any]) -> Callable[..., Any]:
        clip = optimizer.clip_grad_by_norm

        @wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.progress.step():
                self._find_schedules(optimizer)
                return None
            if not self._is_synchronized:
                raise RuntimeError(
                    "optimizer.step() was called, but the last backward pass ran inside no_sync(), so the ranks have "
                    "different gradients; leave the last batch before a step out of no_sync()"
                )
            self._total.correct(optimizer)
            if self._max_norm > 0:
                clip(self._max_norm)
            result = step(*args, **kwargs)
            self.progress.finish()
            self._loader.finish_global_batch()
            self._on_step()
            return result

        return run

    def _between_global_batches(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            return None if self.within_global_batch else method(*args, **kwargs)

        return run

    def _dropping(self, zero_grad: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(zero_grad)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.within_global_batch:
                return None
            self.progress.drop()
            self._total.forget()
            return zero_grad(*args, **kwargs)

        return run
