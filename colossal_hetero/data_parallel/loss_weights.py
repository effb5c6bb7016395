"""What a batch counts in the mean over its global batch, by the name of what its loss is a mean over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["IGNORED", "WEIGHT_OF", "weight_function"]

IGNORED = -100
"""Label of what the loss leaves out, in torch's cross-entropy and in transformers."""


def tokens(batch: Any) -> int:
    """The number of labels that are not ``IGNORED``. ``batch["labels"]``: integers ``[samples, tokens]``."""
    return _counted(_labels(batch))


def next_tokens(batch: Any) -> int:
    """As :func:`tokens`, without the first label of each sequence, for which there is no prediction."""
    return _counted(_labels(batch)[:, 1:])


WEIGHT_OF: dict[str, Callable[[Any], int]] = {"tokens": tokens, "next_tokens": next_tokens}
"""The count of a batch, by name."""


def weight_function(weight_by: str | Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """The function that counts a batch; None if samples are counted."""
    if weight_by is None or callable(weight_by):
        return weight_by
    return WEIGHT_OF.get(weight_by)


def _labels(batch: Any) -> Tensor:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() < 2:
        raise TypeError(
            'weight_by="tokens" and "next_tokens" need batches that are mappings with integer labels [samples, tokens] '
            "under the key labels; for other batches give a function of the batch"
        )
    return labels


def _counted(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())
