"""Labels that a loss may leave out of its mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from colossal_hetero.data_parallel.loss_weights import refuse_ignored


@pytest.mark.parametrize("as_batch", [lambda labels: {"labels": labels}, lambda labels: (labels.float(), labels)])
def test_maps_with_pixels_without_a_class_are_refused(as_batch: Any) -> None:
    """255 may be a token."""
    check, labels = refuse_ignored(None), torch.zeros(2, 4, 4, dtype=torch.long)
    check(as_batch(labels))
    labels[1, 2, 3] = 255
    check(as_batch(labels.flatten(1)))
    with pytest.raises(RuntimeError, match="a batch has labels of 255, which the samples that were compared"):
        check(as_batch(labels))
