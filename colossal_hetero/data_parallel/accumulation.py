"""A training loop that steps after every batch, made to step once per global batch, with exact gradients.

The loop stays as it was: forward, loss, ``booster.backward``, ``optimizer.step``, ``zero_grad``, once per micro-batch
that the loader gives it. Between the micro-batches of one global batch, ``step``, ``zero_grad``, clipping and the
learning rate's schedule do nothing.

[Note: weights of micro-batches]
Data parallelism averages gradients over ranks. With the mean loss over its n samples, a micro-batch of a global batch
of N samples on R ranks is weighted by ``n · R / N``: summed over micro-batches and averaged over ranks the gradient
is the mean over the N samples, whatever the division. A rank without samples runs one with weight zero, because its
peers wait for it in the collectives.
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

__all__ = ["Accumulation"]


class Accumulation:
    """Follows a loader through its micro-batches and makes model, optimizer and schedule do what each is for.

    Args:
        loader: hands out the micro-batches.
        ranks: how many ranks gradients are averaged over.
        synchronize: told before each forward pass whether its gradients are to be summed over ranks.
        max_norm: clip gradients by this norm before each step; 0 does not.
        on_step: called after each real optimizer step.
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
        """Whether gradients have been gathered that the optimizer has not stepped with."""

    def weight(self, micro_batch: MicroBatch) -> float:
        """What the mean loss over a micro-batch is multiplied by; see [Note: weights of micro-batches]."""
        return micro_batch.samples * self._ranks / micro_batch.global_samples

    def attach(self, model: ModelWrapper, optimizer: OptimizerWrapper, lr_scheduler: LRScheduler | None) -> None:
        """Replace the methods that a training loop calls. Call it once, on what a plugin has configured."""
        self._drop_gradients = optimizer.zero_grad
        model.register_forward_pre_hook(self._before_forward)
        optimizer.backward = self._weighted(optimizer.backward)
        optimizer.step = self._stepping(optimizer, optimizer.step)
        optimizer.zero_grad = self._between_global_batches(optimizer.zero_grad)
        for name in ("clip_grad_by_norm", "clip_grad_by_value", "unscale_grad"):
            setattr(optimizer, name, self._before_the_step(getattr(optimizer, name)))
        if lr_scheduler is not None:
            self._pace(lr_scheduler)

    def _current(self) -> MicroBatch:
        if self._loader.current is None:
            raise RuntimeError(
                "this batch did not come from the loader that plugin.prepare_dataloader made and booster.boost "
                "was given; "
                "only its batches are divided by what each device can do"
            )
        return self._loader.current

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        micro_batch = self._current()
        is_new, self._seen = micro_batch is not self._seen, micro_batch
        if is_new and self._loader.micro_step == 0 and self.within_global_batch:
            # The loop left a global batch half done: what it gathered belongs to nothing.
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

    def _before_the_step(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs) if self._current().is_last else None

        return run

    def _pace(self, lr_scheduler: LRScheduler) -> None:
        """Let a schedule advance with optimizer steps. By its class, because its attributes are its checkpoint."""
        accumulation = self

        class Paced(type(lr_scheduler)):  # type: ignore[misc]
            def step(self, *args: Any, **kwargs: Any) -> None:
                if not accumulation.within_global_batch:
                    super().step(*args, **kwargs)

        Paced.__name__ = type(lr_scheduler).__name__
        lr_scheduler.__class__ = Paced

    def _between_global_batches(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            return None if self.within_global_batch else method(*args, **kwargs)

        return run
