"""Check, before training, that the loss is a finite mean over the samples of a batch.

The gradient of a micro-batch is weighted by its samples, which is right for a mean only (see "weights of micro-batches"
in :mod:`colossal_hetero.data_parallel.accumulation`). The loss of one sample is compared with that of a batch that
holds the same sample twice: a mean stays the same, a sum doubles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from torch import Tensor, nn

from ...processes.every_rank import on_every_rank
from ..aborted_step import abort_step
from ..local_collectives import local_collectives
from ..memory import is_out_of_memory, recover
from ..preserved_state import preserved_state
from ..training_step import TrialRun

__all__ = ["LossKind", "check_loss", "kind_of_loss", "uncompiled"]

LossKind = Literal["mean", "sum", "not finite", "unknown"]
"""``unknown``: neither a mean nor a sum, or too random to tell."""

Mode = Literal["evaluation", "training"]
Losses = tuple[tuple[float, float], float]
"""Two losses of one sample, and the loss of a batch that holds it twice."""

SAMPLES = 4
"""If the loss of a sample is not finite, for example because all its labels are ignored, so many samples are tried."""

TOLERANCE = 0.02
"""Largest relative difference between losses that count as equal; a loss in bfloat16 has a precision of 0.4 %."""

MAX_NOISE = 0.2
"""If the loss of the same batch varies by more than this share, for example by dropout, its kind is unknown."""


def kind_of_loss(one: Sequence[float], twice: float) -> LossKind:
    """What the loss of a batch is, from losses of one sample and of a batch that holds it twice.

    Args:
        one: losses of a batch of one sample, computed at least twice; their spread is the noise.
        twice: loss of a batch that holds that sample twice.
    """
    if not all(map(math.isfinite, (*one, twice))):
        return "not finite"
    middle = sum(one) / len(one)
    noise = max(one) - min(one)
    if noise > MAX_NOISE * abs(middle):
        return "unknown"
    tolerance = TOLERANCE * abs(middle) + 1.5 * noise
    if abs(twice - middle) <= tolerance:
        return "mean"
    return "sum" if abs(twice - 2 * middle) <= tolerance else "unknown"


def check_loss(trial: TrialRun) -> None:
    """Check the loss that ``trial`` computes, on the first samples of the dataset. Every rank calls it.

    Nothing is trained, and no communication happens in the model. Model, optimizer and random state are restored. A
    loss that is neither a mean nor a sum is accepted, since its kind cannot be told from a few samples. If two samples
    do not fit into memory, nothing is checked.

    Raises:
        ValueError: on every rank, if the loss of a rank is a sum over the samples, or not finite for each of the first
            samples.
        RuntimeError: on every rank, if the training step of a rank fails, or returns something that is no scalar
            tensor.
    """
    tried = on_every_rank(lambda: _in_a_working_mode(trial), "checking the loss")
    found = [losses for _, losses in tried if losses is not None]
    if len(found) < len(tried):
        return
    mode: Mode = "evaluation" if all(mode == "evaluation" for mode, _ in tried) else "training"
    if any(kind_of_loss(one, twice) == "not finite" for one, twice in found):
        # Without communication, sharded parameters are not those of the model, and their loss may be not finite by
        # chance. The passes above have succeeded on all ranks, so that no rank waits for another one now.
        found = on_every_rank(lambda: _losses(trial, mode, communicate=True), "checking the loss")
    for rank, (one, twice) in enumerate(found):
        kind = kind_of_loss(one, twice)
        if kind == "sum":
            raise ValueError(
                f"rank {rank}: the loss is a sum over the samples (it is {one[0]:.6g} for a sample, and {twice:.6g} if "
                "the batch holds this sample twice), but micro-batches of different sizes need the mean. Use "
                'reduction="mean" or divide the loss by the number of samples, also in training_step if you gave one'
            )
        if kind == "not finite":
            raise ValueError(
                f"rank {rank}: the loss of each of the first samples is not a finite number (it is {one[0]:g} for the "
                "last one that was tried). Check inputs, labels (a mean over no label is nan) and the model's "
                "weights, or give a training_step that computes the loss as your loop does"
            )


def _in_a_working_mode(trial: TrialRun) -> tuple[Mode, Losses | None]:
    """The losses in the first mode in which the step computes one; None if there is not enough memory."""
    try:
        with suppress(Exception):
            # Evaluation mode is best, because it switches all randomness off.
            return "evaluation", _losses(trial, "evaluation")
        # Some models compute their loss in training mode only.
        return "training", _losses(trial, "training")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        recover(error)
        return "training", None


def _losses(trial: TrialRun, mode: Mode, communicate: bool = False) -> Losses:
    """The losses of one sample, computed twice, and the loss of a batch that holds this sample twice.

    They are of the first sample with a finite loss, or the last one that is tried.
    """
    with preserved_state(trial.model, trial.optimizer), uncompiled(trial.model):
        _set_mode(trial.model, mode)
        for index in range(SAMPLES):
            if communicate:
                losses = _of_sample(trial, index)
            else:
                with local_collectives(trial.model):
                    losses = _of_sample(trial, index)
            if kind_of_loss(*losses) != "not finite":
                break
    return losses


def _of_sample(trial: TrialRun, index: int) -> Losses:
    try:
        first, again, twice = (_number(trial.loss(indices)) for indices in ([index], [index], [index, index]))
    except Exception:
        abort_step(trial.model, trial.optimizer)
        raise
    return (first, again), twice


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """In the block, compiled modules run as written: compiling them for evaluation would take long."""
    compiled: list[Any] = [module for module in model.modules() if hasattr(module, "_orig_mod")]
    forwards = [module.forward for module in compiled]
    modules: list[Any] = list(model.modules())
    in_place = [(module, module._compiled_call_impl) for module in modules if module._compiled_call_impl is not None]
    try:
        for module in compiled:
            module.forward = module._orig_mod.__call__
        for module, _ in in_place:
            module._compiled_call_impl = None
        yield
    finally:
        for module, forward in zip(compiled, forwards, strict=True):
            module.forward = forward
        for module, call in in_place:
            module._compiled_call_impl = call


def _set_mode(model: nn.Module, mode: Mode) -> None:
    """Set evaluation mode, or training mode without dropout and with the running statistics of normalization."""
    model.train(mode == "training")
    for module in model.modules():
        if isinstance(module, (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)):
            module.eval()


def _number(loss: object) -> float:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"the training step returned {what} instead of a scalar tensor, the mean loss over the batch")
    return float(loss)
