"""``BatchConfig`` rejects impossible values with a message that names the possible ones."""

from __future__ import annotations

from typing import Any

import pytest

from colossal_hetero import BatchConfig


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"global_batch_size": 0}, ValueError, "global_batch_size=0 must be at least 1"),
        ({"global_batch_size": -8}, ValueError, "global_batch_size=-8 must be at least 1"),
        ({"global_batch_size": 8.0}, TypeError, "global_batch_size=8.0 must be a whole number"),
        ({"global_batch_size": True}, TypeError, "global_batch_size=True must be a whole number"),
        ({"max_micro_batch": 0}, ValueError, "max_micro_batch=0 must be at least 1"),
        ({"check_every": 0}, ValueError, "check_every=0 must be at least 1"),
        ({"method": "fastest"}, ValueError, "method='fastest' is not one of exact, uniform, flops"),
        ({"accumulation": "mine"}, ValueError, "accumulation='mine' is not one of shared, per_rank"),
        ({"weight_by": "words"}, ValueError, "weight_by='words' is not one of samples, tokens, next_tokens"),
        ({"weight_by": 3}, ValueError, "weight_by=3 is not one of"),
        ({"sync_batchnorm": True, "accumulation": "per_rank"}, ValueError, "sync_batchnorm=True waits for all ranks"),
        ({"reallocate_above": 0}, ValueError, "reallocate_above=0 must be above 0"),
        ({"reallocate_above": float("nan")}, ValueError, "reallocate_above=nan must be above 0"),
    ],
)
def test_impossible_values(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BatchConfig(**{"global_batch_size": 8, **arguments})
