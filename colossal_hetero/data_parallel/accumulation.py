"""Gradient accumulation over uneven micro-batches, with exact gradients and an unchanged training loop.

The training loop calls forward, loss, ``booster.backward``, ``optimizer.step`` and ``zero_grad`` for every micro-batch
of the loader. Between the micro-batches of one global batch, ``step``, ``zero_grad``, gradient clipping and the
learning-rate schedule do nothing, so that the optimizer steps once per global batch.

[Note: weights of micro-batches]
Data parallelism averages gradients over R ranks. The loss of a micro-batch is the mean over its n samples. It is
multiplied by ``n · R / N``, where N is the number of samples of the global batch. Summed over micro-batches and
averaged over ranks, the gradient is then the mean over the N samples for every division. A rank without samples runs
one sample with weight zero, because the other ranks wait for it in the collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from .loader import HeteroDataLoader
from .sampler import MicroBatch

__all__ = ["GradientAccumulation"]


class GradientAccumulation:
    """Makes a model, its optimizer and its schedule accumulate gradients over the micro-batches of each global batch.

    Args:
        loader: loader of the micro-batches.
        ranks: number of ranks that gradients are averaged over.
        synchronize: called before each forward pass with whether its gradients are to be summed over ranks.
        max_norm: gradients are clipped to this norm before each step; 0: no clipping.
        on_step: called after each real optimizer step, i.e. once per global batch.
    """

    def __init__(
        self,
        loader: HeteroDataLoader,
        ranks: int,
        synchronize: Callable[[bool], None],
        *,
        max_norm: float = 0.0,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._loader = loader
        self._ranks = ranks
        self._synchronize = synchronize
        self._max_norm = max_norm
        self._on_step = on_step
        self._drop_gradients: Callable[[], None] = lambda: None
        self._seen: MicroBatch | None = None
        self.within_global_batch = False
        """Whether there are accumulated gradients that the optimizer has not used yet."""

    def weight(self, micro_batch: MicroBatch) -> float:
        """The factor of the mean loss of a micro-batch; see [Note: weights of micro-batches]."""
        return micro_batch.samples * self._ranks / micro_batch.global_samples

    def attach(self, model: ModelWrapper, optimizer: OptimizerWrapper, lr_scheduler: LRScheduler | None) -> None:
        """Replace the methods that a training loop calls. Call it once, on objects that a plugin has configured."""
        self._drop_gradients = optimizer.zero_grad
        model.register_forward_pre_hook(self._before_forward)
        optimizer.backward = self._weighted(optimizer.backward)
        optimizer.step = self._stepping(optimizer, optimizer.step)
        optimizer.zero_grad = self._between_global_batches(optimizer.zero_grad)
        for name in ("clip_grad_by_norm", "clip_grad_by_value", "unscale_grad"):
            setattr(optimizer, name, self._only_in_last_micro_batch(getattr(optimizer, name)))
        if lr_scheduler is not None:
            self._step_with_optimizer(lr_scheduler)

    def _current(self) -> MicroBatch:
        if self._loader.current is None:
            raise RuntimeError(
                "this batch is not from the loader that plugin.prepare_dataloader made and that was passed to "
                "booster.boost; train with the batches of that loader only"
            )
        return self._loader.current

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        micro_batch = self._current()
        is_new, self._seen = micro_batch is not self._seen, micro_batch
        if is_new and self._loader.micro_step == 0 and self.within_global_batch:
            # The loop left a global batch before its end, so its accumulated gradients are dropped.
            self.within_global_batch = False
            self._drop_gradients()
        self._synchronize(micro_batch.is_last)

    def _weighted(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def run(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            micro_batch = self._current()
            self.within_global_batch = True
            return backward(loss * self.weight(micro_batch), *args, **kwargs)

        return run

    def _stepping(self, optimizer: OptimizerWrapper, step: Callable[..., Any]) -> Callable[..., Any]:
        clip = optimizer.clip_grad_by_norm

        @wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._current().is_last:
                return None
            if self._max_norm > 0:
                clip(self._max_norm)
            result = step(*args, **kwargs)
            self.within_global_batch = False
            self._loader.finish_global_batch()
            self._on_step()
            return result

        return run

    def _only_in_last_micro_batch(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs) if self._current().is_last else None

        return run

    def _step_with_optimizer(self, lr_scheduler: LRScheduler) -> None:
        """Let a schedule step only when the optimizer does.

        The class of the schedule is replaced rather than its method, because its attributes are saved in checkpoints.
        """
        accumulation = self

        class SteppedWithOptimizer(type(lr_scheduler)):  # type: ignore[misc]
            def step(self, *args: Any, **kwargs: Any) -> None:
                if not accumulation.within_global_batch:
                    super().step(*args, **kwargs)

        SteppedWithOptimizer.__name__ = type(lr_scheduler).__name__
        lr_scheduler.__class__ = SteppedWithOptimizer

    def _between_global_batches(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            return None if self.within_global_batch else method(*args, **kwargs)

        return run
