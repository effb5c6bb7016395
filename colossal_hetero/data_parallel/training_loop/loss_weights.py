"""What a batch counts in the mean over its global batch, by the name of what its loss is a mean over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...profiling.batches.loss_mean import IGNORED, labels_of, loss_mean
from ...profiling.training_step import TrialRun

__all__ = ["WORDS", "found_weight", "refuse_ignored", "weight_function"]


def tokens(batch: Any) -> int:
    """The number of labels that are not ``IGNORED``. ``batch["labels"]``: integers ``[samples, tokens]``."""
    return _counted(_labels(batch))


def next_tokens(batch: Any) -> int:
    """As :func:`tokens`, without the first label of each sequence, for which there is no prediction."""
    return _counted(_labels(batch)[:, 1:])


WEIGHT_OF: dict[str, Callable[[Any], int]] = {"tokens": tokens, "next_tokens": next_tokens}
"""The count of a batch, by name."""


WORDS = {
    "samples": "by samples",
    "tokens": "by tokens whose label is not -100",
    "next_tokens": "by tokens whose label is not -100, without the first of each sequence",
}


def weight_function(weight_by: str | Callable[[Any], Any]) -> Callable[[Any], Any] | None:
    """The function that counts a batch; None if samples are counted."""
    return weight_by if callable(weight_by) else WEIGHT_OF.get(weight_by)


def found_weight(trial: TrialRun) -> str:
    """What the user's loss is a mean over, found by comparing losses. Every rank calls it.

    Raises:
        ValueError: on every rank, if the losses agree with no kind of mean.
    """
    found = loss_mean(trial)
    if found == "other":
        raise ValueError(
            "the loss of two samples together is not the mean of their losses, so micro-batches of different sizes "
            "need weights that the plugin cannot find out: give weight_by, a function of a batch that returns what its "
            'loss was divided by, such as lambda batch: batch["mask"].sum(). If the loss compares the samples of a '
            'batch with each other, it depends on how they are divided; weight_by="samples" trains all the same'
        )
    return found


def refuse_ignored(batch: Any) -> None:
    """Refuse labels that the loss leaves out, if none of the samples that were looked at before training had any."""
    labels = labels_of(batch)
    if labels is not None and bool((labels == IGNORED).any()):
        raise RuntimeError(
            f"a batch has labels of {IGNORED}, which the first samples of the dataset did not have, so losses are "
            'weighted by samples; if the loss is a mean over the other labels, give weight_by="tokens" or '
            '"next_tokens" (causal language models), otherwise weight_by="samples"'
        )


def _labels(batch: Any) -> Tensor:
    labels = labels_of(batch)
    if labels is None:
        raise TypeError(
            'weight_by="tokens" and "next_tokens" need batches that are mappings with integer labels [samples, tokens] '
            "under the key labels; for other batches give a function of the batch"
        )
    return labels


def _counted(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())
