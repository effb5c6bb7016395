"""Find out, before training, what the loss of a batch is a mean over: its samples or its tokens.

Micro-batches have different sizes, so their losses need different weights (see "weights of micro-batches" in
:mod:`colossal_hetero.data_parallel.accumulation`). A few losses without gradients show what the weights are. Whether a
loss is a mean at all is checked in loss_check.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...processes.every_rank import on_every_rank
from ..aborted_step import abort_step
from ..preserved_state import preserved_state
from ..training_step import TrialRun
from .loss_check import uncompiled

__all__ = ["IGNORED", "LossMean", "labels_of", "loss_mean", "mean_of_labels", "mean_of_samples"]

LossMean = Literal["samples", "tokens", "next_tokens", "other"]
"""``next_tokens``: over all tokens but the first of each sequence, which a causal language model does not predict."""

IGNORED = -100
"""Label of a token that the loss leaves out."""

SAMPLES = 8
"""Samples of the dataset that are looked at."""

TOLERANCE = 0.02
"""Largest relative difference between losses that count as equal; a loss in bfloat16 has a precision of 0.4 %."""

NOISE = 1e-3
"""If the loss of a sample varies by more than this share, it is random."""

PART = 0.2
"""The loss of two samples is the mean of their losses if it differs from it by less than this part of their difference,
in addition to :data:`TOLERANCE` of its value."""


def mean_of_labels(full: float, half_ignored: float, only_first: float) -> LossMean:
    """What a loss is a mean over, if its labels can be ignored.

    Args:
        full: loss of a sequence.
        half_ignored: loss of a batch of that sequence and another one, all of whose labels are ignored.
        only_first: loss of that sequence with all labels but the first ignored.
    """
    if not math.isclose(half_ignored, full, rel_tol=TOLERANCE):
        return "other"
    # A mean over nothing is not a number; some losses divide by at least 1 and are 0 then.
    return "tokens" if math.isfinite(only_first) and only_first != 0 else "next_tokens"


def mean_of_samples(one: float, other: float, both: float) -> LossMean:
    """Whether a loss is the mean over samples, from the losses of two samples and of the batch of both."""
    error = abs(both - (one + other) / 2)
    return "samples" if error <= PART * abs(one - other) + TOLERANCE * abs(both) else "other"


def labels_of(batch: Any) -> Tensor | None:
    """The integer labels ``[samples, tokens]`` of a mapping under the key ``labels``; None if there are none."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() != 2:
        return None
    return labels if labels.shape[1] > 1 else None


def loss_mean(trial: TrialRun) -> LossMean:
    """What the loss that ``trial`` computes is a mean over. Every rank calls it, and gets the same answer.

    It is ``other`` if the losses of some samples agree with none of the others. Labels are looked at only if some of
    the first samples have ignored ones; otherwise it makes no difference whether samples or tokens are counted. If the
    loss is random, or cannot be computed in evaluation mode, nothing can be found out, and it is ``samples``.

    Nothing is trained. Model, optimizer and random state are restored.
    """
    found = on_every_rank(lambda: _in_evaluation_mode(trial), "finding out what the loss is a mean over")
    order: tuple[LossMean, ...] = ("samples", "tokens", "next_tokens", "other")
    return max(found, key=order.index)


def _in_evaluation_mode(trial: TrialRun) -> LossMean:
    with preserved_state(trial.model, trial.optimizer), uncompiled(trial.model):
        trial.model.eval()
        try:
            return _found(trial)
        except Exception:
            # Of the model or the step, which need training mode: check_loss has computed a loss there.
            abort_step(trial.model, trial.optimizer)
            return "samples"


def _found(trial: TrialRun) -> LossMean:
    count = min(SAMPLES, len(trial.loader.dataset))  # type: ignore[arg-type]
    if count < 2:
        return "samples"
    labels = labels_of(trial.batch(range(count)))
    if labels is not None and bool((labels == IGNORED).any()):
        return _of_labels(trial, labels)
    losses = [float(trial.loss([index])) for index in range(count)]
    low, high = (losses.index(extreme) for extreme in (min(losses), max(losses)))
    again, both = float(trial.loss([low])), float(trial.loss([low, high]))
    if not math.isclose(again, losses[low], rel_tol=NOISE):
        return "samples"
    return mean_of_samples(losses[low], losses[high], both)


def _of_labels(trial: TrialRun, labels: Tensor) -> LossMean:
    index = int((labels != IGNORED).sum(1).argmax())
    own = trial.batch([index])["labels"][0]
    nothing = torch.full_like(own, IGNORED)
    only_first = nothing.clone()
    only_first[0] = own[own != IGNORED][0]

    def loss(samples: Sequence[int], last: Tensor) -> float:
        """The loss of these samples with other labels of the last of them."""
        batch = dict(trial.batch(samples))
        batch["labels"] = torch.cat([batch["labels"][:-1], last[None]])
        return float(trial.loss_of(batch))

    return mean_of_labels(loss([index], own), loss([index, index], nothing), loss([index], only_first))
