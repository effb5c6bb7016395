"""The search for the largest batch: exact for every size, cap and estimate, in few trials."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from colossal_hetero.profiling.device_profiler import LargestBatch, largest_batch

SIZES = range(301)


def bound(largest: int) -> float:
    return 2 * math.log2(largest) + 4 if largest else 1


def check(search: LargestBatch, true: int, cap: int) -> None:
    found = min(true, cap)
    assert search.largest == found, (true, cap, search)
    assert len(search.tried) <= bound(found), (true, cap, search)
    batches = [batch for batch, _ in search.tried]
    assert len(set(batches)) == len(batches) and all(1 <= batch <= cap for batch in batches)
    assert all(fitted == (batch <= true) for batch, fitted in search.tried)
    failed = [batch for batch, fitted in search.tried if not fitted]
    assert min(failed, default=None) == (None if true >= cap else found + 1)


@pytest.mark.parametrize("cap_of", [lambda true: 300, lambda true: max(true, 1), lambda true: true + 1])
def test_every_size_without_an_estimate(cap_of: Callable[[int], int]) -> None:
    for true in SIZES:
        check(largest_batch(lambda batch, true=true: batch <= true, cap_of(true)), true, cap_of(true))


def test_every_size_and_cap() -> None:
    for true in range(0, 70):
        for cap in range(1, 70):
            check(largest_batch(lambda batch, true=true: batch <= true, cap), true, cap)


@pytest.mark.parametrize("factor", [0.0, 0.3, 0.9, 1.0, 1.1, 3.0, 1e6])
@pytest.mark.parametrize("offset", [-3, -1, 0, 1, 5])
def test_no_estimate_changes_what_is_found(factor: float, offset: int) -> None:
    for true in SIZES:
        search = largest_batch(
            lambda batch, true=true: batch <= true, 400, lambda true=true: int(factor * true) + offset
        )
        check(search, true, 400)


def test_estimates_that_change_or_are_missing() -> None:
    generator = random.Random(0)
    for true in SIZES:
        guesses = lambda: generator.choice([None, generator.randint(-5, 500)])  # noqa: E731
        check(largest_batch(lambda batch, true=true: batch <= true, 350, guesses), true, 350)


def test_an_exact_estimate_avoids_the_bisection() -> None:
    for true in range(1, 301):
        search = largest_batch(lambda batch, true=true: batch <= true, 1000, lambda true=true: true)
        assert len(search.tried) <= math.floor(math.log2(true)) + 4


def test_an_estimate_that_must_not_be_exceeded_is_not_exceeded() -> None:
    for room in range(0, 120):
        for true in (0, 1, 50, 1000):
            search = largest_batch(
                lambda batch, true=true: batch <= true, 100, lambda room=room: room, may_exceed_estimate=False
            )
            assert all(batch <= max(room, 1) for batch, _ in search.tried)
            assert search.largest == min(max(room, 1), true, 100)
            assert len(search.tried) <= bound(search.largest) + (search.largest == 0)


def test_the_search_ends_if_the_estimate_rises_slowly() -> None:
    largest = 0

    def fits(batch: int) -> bool:
        nonlocal largest
        largest = max(largest, batch)
        return True

    search = largest_batch(fits, 10**6, lambda: largest + 1, may_exceed_estimate=False)
    assert len(search.tried) <= 4 and search.largest == largest


def test_no_cap() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        largest_batch(lambda batch: True, 0)
