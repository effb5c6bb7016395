"""Gradient accumulation over uneven micro-batches, with exact gradients and an unchanged training loop: within a global
batch, ``step``, ``zero_grad``, clipping and schedules do nothing. Tensors tell which micro-batch a pass belongs to
(tagged_tensor.py), and what would train to other weights is refused (progress.py).

[Note: weights of micro-batches] Data parallelism averages gradients over R ranks. The loss of a micro-batch, a mean
over parts that count w together (usually its samples), is multiplied by ``w · R / W``, where W is the sum of w over the
global batch: then the gradient is the mean over the global batch for every division. A rank without samples runs one
with weight zero. If W is not known in advance, such as the number of tokens, an estimate takes its place, and sums are
corrected before the step (``CountedTotal``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from colossalai.amp.naive_amp.mixed_precision_optimizer import MixedPrecisionOptimizer
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from ..colossalai_support.corrections import user_hooks
from ..common.methods import wrap_method
from ..profiling.preserved_state import inner_optimizer
from .config import BatchSetup
from .loader import HeteroDataLoader
from .loss_weights import SampleTotal
from .progress import LoopProgress, MicroBatch, followers_of, pause_within_global_batch
from .tagged_tensor import micro_batches_of, share_of_samples, untagged
from .unsummed_steps import CLIPPING, GradientGuard, prepare_sums


def check_hooks(parameters: Iterable[tuple[str, Tensor]], stage: int) -> None:
    """Refuse the user's hooks on parameters whose results would not be those for the gradient of the global batch. A
    hook of ``register_hook`` gets the gradient of one micro-batch, times its weight, so it must be linear."""
    with torch._C.DisableTorchFunctionSubclass():  # parameters may be late
        found = [(name, *each) for name, parameter in parameters for each in user_hooks(parameter)]
    for name, hook, is_late in found:
        if is_late:
            reason = (
                "it would use the gradient of this rank's micro-batch and not that of the global batch; use gradients "
                "after the backward pass, at stage 0 and where loader.is_last"
            )
        elif stage == 3:
            reason = "FSDP calls no hooks of parameters; use stage 0, 1 or 2"
        elif not getattr(hook, "is_linear", False):
            reason = (
                "it is called for each micro-batch of each rank, whose gradients are summed afterwards; clip by "
                "optimizer.clip_grad_by_norm() or clip_grad_by_value(), or change gradients after the backward pass, "
                "at stage 0 and where loader.is_last. If what it returns is linear in the gradient, as with a mask or "
                "a factor, set is_linear = True on the function"
            )
        else:
            continue
        what = getattr(getattr(hook, "func", hook), "__qualname__", type(hook).__name__)
        raise RuntimeError(f"the hook {what} on the parameter {name} cannot be exact, because {reason}")


class GradientAccumulation:
    """Gradient accumulation of a model, its optimizer and schedules over the micro-batches of each global batch."""

    def __init__(
        self,
        setup: BatchSetup,
        loader: HeteroDataLoader,
        total: SampleTotal,
        weight_by: Any,
        on_step: Callable[[], None],
    ) -> None:
        self._setup, self._stage, self._loader = setup, setup.stage, loader
        self._total, self._weight_by, self._on_step = total, weight_by, on_step
        self._is_unscaled = self._knows_schedules = self._runs_backward = False
        self._rates: list[Any] = []
        self._guarded_for: str | None = None
        self._latest_norm: Any = torch.zeros(())
        self._waits: bool | None = None
        """True if DDP sums gradients after the running forward pass; within it, it must not wait for any."""
        self._forwards = 0  # forward passes since the latest backward pass
        self.progress = LoopProgress()

    def attach(self, model: ModelWrapper, optimizer: OptimizerWrapper, lr_scheduler: LRScheduler | None) -> None:
        """Replace the methods that a training loop calls. Called once, on objects that a plugin has configured."""
        self._loader.follow(self.progress, self._weight_by)
        self._model = model
        self._drop_gradients: Callable[..., None] = optimizer.zero_grad
        self._param_groups: list[dict[str, Any]] = inner_optimizer(optimizer).param_groups
        self._parameters = list(model.named_parameters())
        self._guard = GradientGuard(self._parameters)
        check_hooks(self._parameters, self._stage)
        self._watch_backward(model)
        self._replica = next((each for each in model.modules() if isinstance(each, DistributedDataParallel)), None)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        model.register_forward_hook(self._after_forward, always_call=True)
        clip = optimizer.clip_grad_by_norm
        wrap_method(optimizer, "backward", self._backward)
        wrap_method(optimizer, "step", partial(self._step, optimizer, clip))
        wrap_method(optimizer, "zero_grad", self._zero_grad)
        for name in ("clip_grad_by_norm", "clip_grad_by_value", "unscale_grad"):
            wrap_method(optimizer, name, partial(self._between_global_batches, optimizer))
        if lr_scheduler is not None:
            pause_within_global_batch(lr_scheduler, self.progress)

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._open_gradients()
        given = [*args, *kwargs.values()]
        sources = micro_batches_of(given)
        args, kwargs = untagged(args), untagged(kwargs)
        is_trained = torch.is_grad_enabled() and any(each.requires_grad for each in model.parameters())
        self._forwards += is_trained
        if self._replica is not None and not is_trained:
            self._waits, self._replica.require_backward_grad_sync = self._replica.require_backward_grad_sync, False
        # A model in evaluation mode may be trained, for example with frozen statistics.
        if torch.is_grad_enabled() and not is_trained:
            self.progress.frozen_forward(sources)
        elif is_trained and (model.training or sources):
            must_drop = self.progress.must_drop
            micro_batch = self.progress.forward(sources, share_of_samples(sources[0], given) if sources else 1.0)
            if micro_batch is not None:
                check_hooks(self._parameters, self._stage)
                if must_drop and not self.progress.must_drop:
                    self._drop()
                self._check_rates(micro_batch)
                self._setup.synchronize(micro_batch.is_last)
        return args, kwargs

    def _after_forward(self, *_: Any) -> None:
        if self._replica is not None and self._waits is not None:
            self._replica.require_backward_grad_sync, self._waits = self._waits, None
        self._close_gradients()

    def _check_rates(self, micro_batch: MicroBatch) -> None:
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

    def _backward(self, backward: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._open_gradients()
        micro_batch = self.progress.backward(micro_batches_of(loss))
        loss = self._total.weighted(untagged(loss), micro_batch)
        forwards, self._forwards = self._forwards, 0
        if self._stage == 3 and not forwards:
            raise RuntimeError(
                "there is a second backward pass since the latest forward pass, and at ZeRO stage 3 the first one "
                "frees the gathered parameters; add the losses and call booster.backward once, call the model before "
                "each booster.backward, or use stage 0, 1 or 2"
            )
        if self._replica is not None and forwards != 1 and self._replica.require_backward_grad_sync:
            prepare_sums(self._replica, loss)
        self._runs_backward = True
        try:
            result = backward(loss, *args, **kwargs)
        finally:
            self._runs_backward = False
        self._guarded_for = self._why_guarded()
        self._close_gradients()
        return result

    def _why_guarded(self) -> str | None:
        """Reason why gradients are not those of the global batch, and what to do; None if they are."""
        if self._stage:
            return f"at ZeRO stage {self._stage} each rank has another part of it; {CLIPPING}"
        if self.progress.is_within_global_batch:
            return f"it lacks micro-batches of the global batch; {CLIPPING}, or use it where loader.is_last"
        if self._total.is_estimated:
            return f"it is corrected before the step, when the sum of weights (weight_by) is known; {CLIPPING}"
        if self._setup.precision == "fp16" and not self._is_unscaled:
            return f"it is multiplied by the loss scale; call optimizer.unscale_grad() before. {CLIPPING}"
        return None

    def _close_gradients(self) -> None:
        if self._guarded_for is not None:
            self._guard.close(self._guarded_for, fill=self._stage in (1, 2))

    def _open_gradients(self) -> None:
        """Let the package use the gradients. If a loop has removed all of them, ``optimizer.zero_grad`` is meant."""
        if self._guard.open() and not self.progress.is_within_global_batch:
            self._drop()

    def _drop(self, *args: Any, **kwargs: Any) -> None:
        self._guard.open(check=False)
        self._guarded_for, self._is_unscaled = None, False
        self._drop_gradients(*args, **kwargs)
        self._total.forget()

    def _watch_backward(self, model: nn.Module) -> None:
        this = ref(self)

        def check(_: Tensor) -> None:
            if (accumulation := this()) is not None and not accumulation._runs_backward:
                raise RuntimeError(
                    "a backward pass other than booster.backward(loss, optimizer) or optimizer.backward(loss) has "
                    "reached parameters of this optimizer; these give the loss of each batch its weight, and "
                    "loss.backward() does not. Freeze or detach what the losses of another model must not reach"
                )

        for leaf in self._setup.leaves or model.parameters():
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(check)

    def _step(
        self, optimizer: OptimizerWrapper, clip: Callable[..., Any], step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if any(each is not None for each in (*args, *kwargs.values())):
            raise ValueError(
                "optimizer.step(closure) is not possible: a closure runs forward and backward passes inside the "
                "step, and the step comes after those of all micro-batches of a global batch. Call the model, "
                "booster.backward(loss, optimizer) and optimizer.step() one after the other"
            )
        if not self.progress.step():
            if not self._knows_schedules:  # those not passed to ``booster.boost``
                self._knows_schedules = True
                for each in followers_of(optimizer, self._model):
                    pause_within_global_batch(each, self.progress)
            return None
        self._open_gradients()
        self._total.correct(optimizer)
        if self._setup.max_norm > 0:
            clip(self._setup.max_norm)
        result = step(*args, **kwargs)
        self._guarded_for, self._is_unscaled = self._why_guarded(), False
        self._close_gradients()
        self.progress.finish()
        self._loader.finish_global_batch()
        self._on_step()
        return result

    def _between_global_batches(
        self, optimizer: OptimizerWrapper, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``method``, but not within a global batch. Clipping by norm returns the norm of the latest global batch
        that was clipped, 0 before. All ranks call it, because they may have to correct their gradients."""
        if method.__name__ == "unscale_grad" and self._is_unscaled:
            return None
        if not self.progress.is_within_global_batch:
            self._open_gradients()
            self._total.correct(optimizer)
            result = method(*args, **kwargs)
            self._latest_norm = self._latest_norm if result is None else result
            # Optimizers that work on copies of the parameters clip scaled gradients.
            self._is_unscaled = not isinstance(optimizer, MixedPrecisionOptimizer)
            self._guarded_for = self._why_guarded()
            self._close_gradients()
        return self._latest_norm if method.__name__ == "clip_grad_by_norm" else None

    def _zero_grad(self, zero_grad: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if not self.progress.is_within_global_batch:
            self.progress.drop()
            self._drop(*args, **kwargs)
