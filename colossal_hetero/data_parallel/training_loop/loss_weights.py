"""What a batch counts in the mean over its global batch, by the name of what its loss is a mean over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from ...processes.every_rank import on_every_rank
from ...profiling.batches.loss_mean import COMPARED, IGNORED, found_mean, ignored_labels, labels_of
from ...profiling.training_step import TrialRun, with_dicts

__all__ = ["WORDS", "found_weight", "refuse_ignored", "samples_in", "weight_function"]


def tokens(batch: Any) -> int:
    """The number of labels (see :func:`.labels_of`) that are not ``IGNORED``."""
    return _counted(_labels(batch))


def next_tokens(batch: Any) -> int:
    """As :func:`tokens`, without the first label of each sequence, for which there is no prediction."""
    labels = _labels(batch)
    if labels.dim() != 2:
        raise TypeError(f'weight_by="next_tokens" needs labels [samples, tokens], not {list(labels.shape)}')
    return _counted(labels[:, 1:])


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


def found_weight(trial: TrialRun, precision: str) -> str:
    """What the user's loss is a mean over, found by comparing losses. Every rank calls it; see :func:`.found_mean`.

    Raises:
        ValueError: on every rank, if the losses agree with no kind of mean, or with several.
    """
    found = found_mean(trial, precision)
    if found.kind in WORDS:
        return found.kind
    why = f" ({found.reason})" if found.reason else ""
    if found.kind == "undecided":
        raise ValueError(
            f"what the loss is a mean over cannot be found out by comparing losses{why}, but micro-batches of "
            'different sizes need the right weights: give weight_by="samples" if the loss is the mean over the samples '
            'of a batch, "tokens" or "next_tokens" if it is one over labels that are not -100, or a function of a '
            "batch that returns what its loss was divided by"
        )
    raise ValueError(
        f"the loss of two samples together is not the mean of their losses{why}, so micro-batches of different sizes "
        "need weights that the plugin cannot find out: give weight_by, a function of a batch that returns what its "
        'loss was divided by, such as lambda batch: batch["mask"].sum(). If the loss compares the samples of a '
        'batch with each other, it depends on how they are divided; weight_by="samples" trains all the same'
    )


def refuse_ignored(criterion: Any) -> Callable[[Any], None]:
    """What refuses batches with labels that the loss may leave out, if no sample that was compared had any.

    Segmentation maps ``[samples, height, width]`` often have 255 for pixels without a class.
    """
    ignored = ignored_labels(criterion)

    def check(batch: Any) -> None:
        labels = labels_of(batch)
        if labels is None:
            return
        for value in (*ignored, 255) if labels.dim() > 2 else ignored:
            if bool((labels == value).any()):
                raise RuntimeError(
                    f"a batch has labels of {value}, which the samples that were compared before training did not "
                    "have, so losses are weighted by samples; if the loss is a mean over the other labels, give "
                    'weight_by="tokens" or "next_tokens" (causal language models) for -100, or a function such as '
                    f'lambda batch: (batch["labels"] != {value}).sum(), otherwise weight_by="samples"'
                )

    return check


def samples_in(trial: TrialRun) -> Callable[[Any], float] | None:
    """A function that counts the samples of a batch, which may be fewer than planned; None if they cannot be.

    Only a ``collate_fn`` of the user's leaves samples out. Samples are counted by the first tensor whose first size
    grows with the number of samples and is the same for all samples, as some batches show; so tokens of sequences that
    are packed into one tensor are not taken for samples. Every rank calls it, and takes what the first rank finds.
    """
    if trial.loader.collate_fn is default_collate:
        return None
    found = on_every_rank(lambda: _counted_tensor(trial), "counting the samples of a batch")[0]
    if found is None:
        return None
    place, per_sample = found

    def count(batch: Any) -> float:
        sizes = _sizes(batch)
        return (sizes[place] if len(sizes) > place else 0) / per_sample

    return count


def _counted_tensor(trial: TrialRun) -> tuple[int, float] | None:
    """The number of the tensor by which samples are counted, and its first size for one sample."""
    once, twice = (_sizes(trial.batch([trial.first] * trial.at_once * times)) for times in (1, 2))
    others = []
    loader: Any = trial.loader
    for index in loader.some_samples(COMPARED, 0):
        with suppress(Exception):  # collate_fn may leave it out
            others.append(_sizes(trial.batch([index] * trial.at_once)))
    if any(len(sizes) != len(once) for sizes in (twice, *others)):
        return None
    for place, (one, two) in enumerate(zip(once, twice, strict=True)):
        if 0 < 2 * one == two and all(sizes[place] in (0, one) for sizes in others):
            return place, one / trial.at_once
    return None


def _sizes(batch: Any) -> list[int]:
    """The first sizes of the tensors of a batch."""
    leaves = tree_leaves(with_dicts(batch))
    return [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]


def _labels(batch: Any) -> Tensor:
    labels = labels_of(batch)
    if labels is None:
        raise TypeError(
            'weight_by="tokens" and "next_tokens" need integer labels: in a mapping under the key labels, or as the '
            "second part of a pair; for other batches give a function of the batch"
        )
    return labels


def _counted(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())
