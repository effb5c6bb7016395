"""Uneven batches: their settings, what global batches are divided by, and what is said about a division."""

from __future__ import annotations

from typing import Any

import pytest

from colossal_hetero import BatchConfig
from colossal_hetero.data_parallel.batch_balancer import (
    changes_in_words,
    divider_of,
    division_in_words,
)
from colossal_hetero.planner import Curve, allocate
from colossal_hetero.planner.batches.batch_profile import DeviceProfile
from colossal_hetero.planner.batches.closed_loop import Speed
from tests.support.batch_profiles import device, profile


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
        ({"reallocate_above": 0}, ValueError, "reallocate_above=0 must be above 0"),
        ({"reallocate_above": float("nan")}, ValueError, "reallocate_above=nan must be above 0"),
    ],
)
def test_impossible_values(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BatchConfig(**{"global_batch_size": 8, **arguments})


def measured(factor: float) -> DeviceProfile:
    """A device whose measured times are ``factor`` times as long as those of others of its name."""
    points = [{"batch": batch, "seconds": factor * (0.05 + 0.05 * batch)} for batch in (1, 16, 64)]
    return device(points=points, max_batch=64, step_seconds=0.1 * factor)


@pytest.mark.parametrize(("factor", "samples"), [(1.06, [32, 32]), (2.0, [43, 21])])
def test_equal_devices_get_equal_parts_unless_they_differ_clearly(factor: float, samples: list[int]) -> None:
    both = profile(kinds=[measured(1.0), measured(factor)], ranks=[0, 1], links=[])
    divider = divider_of(BatchConfig(global_batch_size=64), both, 1)
    assert [share.samples for share in divider.divide((Speed(), Speed()), 64).shares] == samples
    assert divider.step_seconds == pytest.approx([0.05 * (1 + factor) / 2] * 2 if factor < 2 else [0.05, 0.1])


CURVE = Curve.from_seconds([1.0, 2.0, 3.0, 4.0])


def test_a_division_names_groups_of_equal_ranks() -> None:
    allocation = allocate([CURVE, CURVE, Curve(2.0 * CURVE.seconds)], 10, 1)
    words = division_in_words(allocation, ["A", "A", "B"])
    assert words == "of each global batch of 10: ranks 0-1 (A) 4; rank 2 (B) 2"
    words = division_in_words(allocate([CURVE, CURVE], 16, 1), ["A", "B"])
    assert words == (
        "of each global batch of 16: rank 0 (A) 8 in 2 micro-batches of at most 4; "
        "rank 1 (B) 8 in 2 micro-batches of at most 4"
    )


def test_changes_name_the_ranks_whose_samples_change() -> None:
    before, after = allocate([CURVE] * 2, 6, 1), allocate([CURVE, Curve(2.0 * CURVE.seconds)], 6, 1)
    assert changes_in_words(before, after, [1.0, 2.0], ["A", "B"]) == (
        "global batches of 6 are divided again: rank 0 (A) takes 1.00 times as long as before: 3 → 4 samples; "
        "rank 1 (B) takes 2.00 times as long as before: 3 → 2 samples"
    )
    assert changes_in_words(before, before, [1.1, 1.0], ["A", "B"]) is None
