"""Micro-batches of pipelines, compared with an exhaustive search."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner.batches.equal_devices import divide_micro_batches, micro_batch_seconds, pipeline_seconds


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_no_division_is_faster(seconds: list[float], stages: int, more: int) -> None:
    count = stages * len(seconds) + more
    found = divide_micro_batches(seconds, count, stages)
    assert sum(found) == count and min(found) >= stages

    def wall(counts: tuple[int, ...]) -> float:
        return max(pipeline_seconds(k, c, stages) for k, c in zip(counts, seconds, strict=True))

    possible = product(range(stages, count + 1), repeat=len(seconds))
    assert wall(found) == min(wall(each) for each in possible if sum(each) == count)


def test_a_slow_pipeline_gets_fewer_micro_batches() -> None:
    assert divide_micro_batches([1.0, 1.0], 9, 2) == (5, 4)
    assert divide_micro_batches([1.0, 3.0], 12, 2) == (10, 2)
    assert divide_micro_batches([2.0, 1.0], 12, 1) == (4, 8)


def test_each_pipeline_needs_as_many_micro_batches_as_stages() -> None:
    with pytest.raises(ValueError, match="5 micro-batches are too few for 2 pipelines of 3 stages"):
        divide_micro_batches([1.0, 1.0], 5, 3)


@given(st.floats(0.01, 100), st.integers(1, 50), st.integers(1, 8))
def test_the_time_of_a_micro_batch_is_found_again(seconds: float, count: int, stages: int) -> None:
    assert micro_batch_seconds(pipeline_seconds(count, seconds, stages), count, stages) == pytest.approx(seconds)
