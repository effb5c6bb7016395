"""Position of a training loop: micro-batches of the current global batch drawn, passed forward and passed backward.
Gradients are exact only if every micro-batch passes both ways with its own weight before the optimizer steps. Loops
differ in when they draw, pass and step. This module finds the micro-batch of every pass, and refuses what would train
to other weights. It knows neither tensors nor ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from colossalai.interface import OptimizerWrapper
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ..profiling.preserved_state import inner_optimizer


@dataclass(frozen=True)
class MicroBatch:
    """Position and size of one micro-batch of this rank."""

    samples: int  # number of samples; 0: only placeholder samples, of weight zero
    global_samples: int  # samples of its global batch over all ranks
    global_batch: int
    step: int  # index among this rank's micro-batches in its global batch
    is_last: bool  # True if no other micro-batch of this rank follows in its global batch
    first: int = 0  # number of samples before it in the order of its global batch
    weight: float | None = None  # weight of its mean loss in the global batch; None: its number of samples
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of its tensors, if the loss is weighted by samples: all samples must be passed forward."""


ALL = 1 - 1e-6  # share of samples that counts as all of them

REMEDY = "pass every batch of the loader forward once and call booster.backward(loss, optimizer)"


class LoopProgress:
    """Position of a training loop on this rank. Methods that end with an error leave it as it was."""

    def __init__(self) -> None:
        self.current: MicroBatch | None = None
        """Micro-batch of the latest forward pass or drawn after it, but not one that a prefetcher has drawn ahead."""
        self.must_drop = False
        """True if the loop has left a global batch, whose gradients must be dropped before the next forward pass."""
        self._open: list[MicroBatch] = []  # drawn, no forward pass yet
        self._passed: list[MicroBatch] = []  # forward pass, no backward pass yet
        self._done: list[MicroBatch] = []  # backward pass, no optimizer step yet
        self._shares: dict[int, float] = {}  # of the samples that were passed forward, by id of the micro-batch
        self._step_called = True  # since the latest backward pass
        self._knows_last = False  # the loop has asked whether this is the last micro-batch

    def begin(self) -> None:
        """Begin an iteration over the loader; batches that were drawn but not used are forgotten."""
        self.must_drop = self.must_drop or self.is_within_global_batch
        self.current = None
        self._open.clear()
        self._passed.clear()

    def draw(self, micro_batch: MicroBatch) -> None:
        if not self._open:
            self.current = micro_batch
        self._open.append(micro_batch)

    def is_last(self) -> bool:
        """True if :attr:`current` is the last of its global batch. A loop that asks knows of global batches."""
        self._knows_last = True
        return self.current is not None and self.current.is_last

    def forward(self, sources: Sequence[MicroBatch], share: float = 1.0) -> MicroBatch | None:
        """Micro-batch of a forward pass; None if it does not belong to a batch that is to be trained with."""
        micro_batch = self._source_of_forward(sources)
        if micro_batch is None:
            return None
        if _is_in(micro_batch, self._open):
            self._check_own_accumulation(micro_batch)
            skipped = self._open[: _index(self._open, micro_batch)]
            if skipped and (skipped[0].step > 0 or not skipped[-1].is_last):
                raise RuntimeError(
                    f"{_name(skipped[0])} was drawn, but the next forward pass is that of {_name(micro_batch)}: "
                    f"samples of a global batch would be missing; {REMEDY}, or use loader.load_state_dict() to resume"
                )
            if self.must_drop:
                self.drop()
            del self._open[: len(skipped) + 1]
            self._passed.append(micro_batch)
        elif _is_in(micro_batch, self._done):
            self._check_again(micro_batch)
        elif not _is_in(micro_batch, self._passed):
            if micro_batch.step or not micro_batch.is_last:
                raise RuntimeError(
                    f"{_name(micro_batch)} was drawn in an earlier global batch or iteration, and is a part of a "
                    f"global batch only; {REMEDY}"
                )
            self._passed.append(micro_batch)
        self.current = micro_batch
        self._shares[id(micro_batch)] = self._shares.get(id(micro_batch), 0.0) + share
        return micro_batch

    def frozen_forward(self, sources: Sequence[MicroBatch]) -> None:
        """Check a forward pass that trains no parameters of the model, such as for the loss of another model."""
        latest = sources or self._open or self._passed or self._done[-1:]
        if latest and _is_in(latest[0], self._done):
            self._check_again(latest[0])

    def backward(self, sources: Sequence[MicroBatch]) -> MicroBatch:
        if len(sources) > 1:
            raise RuntimeError(
                f"the loss was computed from several batches of the loader ({_names(sources)}), which have different "
                "weights; call booster.backward() with the loss of one batch at a time"
            )
        running = [*self._passed, *self._done]
        known = [each for each in running if _is_in(each, sources)]
        if not running:
            raise RuntimeError(
                "there is a backward pass, but before it no forward pass with a batch of the loader; train with the "
                "batches of the loader that plugin.prepare_dataloader made and that was passed to booster.boost, and "
                "call the model that booster.boost returned, not a module inside it"
            )
        if known:
            micro_batch = known[0]
        elif len(self._passed) > 1:
            raise RuntimeError(
                f"there were forward passes of several batches ({_names(self._passed)}) and no backward pass, so the "
                "weight of this loss is unknown; call booster.backward() before the next batch is passed forward"
            )
        else:
            micro_batch = running[0] if self._passed else running[-1]
        if _is_in(micro_batch, self._passed):
            del self._passed[_index(self._passed, micro_batch)]
            self._done.append(micro_batch)
        self._step_called = False
        return micro_batch

    def step(self) -> bool:
        """True if ``optimizer.step`` is due: the global batch is complete."""
        if self._passed or not self._done:
            missing = f"{_name(self._passed[0])} had no" if self._passed else "there was no"
            raise RuntimeError(
                f"optimizer.step() was called, but {missing} backward pass by booster.backward(loss, optimizer) or "
                "optimizer.backward(loss), which give the loss of each batch its weight; loss.backward() does not. "
                "Call booster.backward for every batch on every rank, also if a loss is not finite, because the ranks "
                "sum their gradients in it; the norm that optimizer.clip_grad_by_norm() returns is not finite then, on "
                "all ranks, and the loop may leave out the step"
            )
        for micro_batch in self._done:
            if self._shares.get(id(micro_batch), 1.0) < ALL:
                raise RuntimeError(
                    f"the model was given {self._shares[id(micro_batch)]:.0%} of the samples of {_name(micro_batch)}, "
                    "whose loss counts as the mean over all of them; leave samples out in the dataset or in "
                    "collate_fn, or give weight_by, a function of a batch that counts those that are trained with"
                )
        self._step_called = True
        return not self.is_within_global_batch

    def finish(self) -> None:
        self._done.clear()
        self._shares.clear()
        self._knows_last = False

    def drop(self) -> None:
        """Note that the gradients of all micro-batches so far were dropped."""
        self.must_drop = False
        self.finish()

    @property
    def is_within_global_batch(self) -> bool:
        """True if some micro-batches of a global batch had a backward pass, and others are left."""
        return bool(self._done) and not self._done[-1].is_last

    def _source_of_forward(self, sources: Sequence[MicroBatch]) -> MicroBatch | None:
        if len(sources) > 1:
            raise RuntimeError(
                f"the inputs of the model were computed from several batches of the loader ({_names(sources)}), which "
                "have different weights; pass them forward one at a time"
            )
        if sources:
            return sources[0]
        if len(self._open) > 1:
            raise RuntimeError(
                f"{len(self._open)} batches were drawn from the loader ({_names(self._open)}), and the inputs of the "
                "model do not show which of them they are; draw one batch at a time, or compute the inputs from the "
                "batch's tensors by torch functions"
            )
        running = (*self._open, *self._passed, *self._done[-1:])
        return running[0] if running else None

    def _check_again(self, micro_batch: MicroBatch) -> None:
        """Refuse a forward pass with a batch again after a step that was left out."""
        if self._step_called:
            raise RuntimeError(
                f"{_name(micro_batch)} is passed forward again after optimizer.step(), but it is only a part of its "
                "global batch, and the optimizer steps after the last part; to train on one batch again and again, "
                "make global_batch_size small enough for one micro-batch per rank"
            )

    def _check_own_accumulation(self, following: MicroBatch) -> None:
        """Refuse loops that step after several batches of the loader, unless these are whole global batches."""
        if not self._done or self._step_called or self._knows_last or self.must_drop:
            return
        if any(each.step or not each.is_last for each in (*self._done, following)):
            raise RuntimeError(
                f"optimizer.step() was not called after {_name(self._done[-1])}: the loop accumulates gradients over "
                "several batches by itself, but a batch of the loader is only a part of a global batch here. Call "
                "optimizer.step() after every batch, without dividing the loss, and set global_batch_size to all "
                "samples of a step; or step where loader.is_last"
            )


def _is_in(micro_batch: MicroBatch, among: Sequence[MicroBatch]) -> bool:
    return any(each is micro_batch for each in among)


def _index(among: Sequence[MicroBatch], micro_batch: MicroBatch) -> int:
    return next(index for index, each in enumerate(among) if each is micro_batch)


def _name(micro_batch: MicroBatch) -> str:
    return f"micro-batch {micro_batch.step} of global batch {micro_batch.global_batch}"


def _names(micro_batches: Sequence[MicroBatch]) -> str:
    return ", ".join(_name(each) for each in micro_batches)


AVERAGES: Any = (AveragedModel, ModelEmaV2, ModelEmaV3)


def followers_of(optimizer: OptimizerWrapper, model: nn.Module) -> Iterator[LRScheduler | nn.Module]:
    """All torch schedules of this optimizer, and all averages of weights, of torch's and timm's types, of ``model`` or
    of a part of it. These do not know them; they are found among all objects in tenths of 1 s."""
    inner, names = inner_optimizer(optimizer), _plain_names(model)
    for each in gc.get_objects():
        # Not `isinstance`, which runs code of objects that pretend to be others.
        if issubclass(type(each), LRScheduler):
            owner = getattr(each, "optimizer", None)
            if owner is not None and inner_optimizer(owner) is inner:
                yield each
        elif issubclass(type(each), AVERAGES) and _plain_names(each) <= names:
            yield each


def _plain_names(model: nn.Module) -> set[str]:
    return {name.replace("module.", "") for name, _ in model.named_parameters()}


def pause_within_global_batch(owner: Any, progress: LoopProgress) -> None:
    """Let the methods of a schedule of any kind, or of an average of weights (a module), that follow the optimizer's
    steps do nothing while a global batch is incomplete. A second call has no effect. The class is replaced, not the
    methods, because checkpoints save the attributes of a schedule."""
    kind = type(owner)
    if getattr(kind, "pauses", False):
        return

    def paused(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            if not progress.is_within_global_batch:
                method(self, *args, **kwargs)

        return run

    names = ["update", "update_parameters"] if isinstance(owner, nn.Module) else ["step"]
    methods = {name: paused(getattr(kind, name)) for name in names if hasattr(kind, name)}
    owner.__class__ = type(kind.__name__, (kind,), {**methods, "pauses": True})
