"""The largest batch under a real limit of the address space, each time in a new process."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.harness import run_alone
from tests.support.limited import main


def limited(**arguments: Any) -> dict[str, Any]:
    """:mod:`tests.support.limited` in a process of its own."""
    return run_alone(main, **arguments)


def check_trials(sizes: list[int], largest: int) -> None:
    """The sizes that ran: a first pass of one sample, the search, and repeats of sizes that have run."""
    search: list[int] = []
    for size in sizes[1:]:
        if size in search:
            break
        search.append(size)
    assert len(search) <= 2 * math.log2(largest) + 4, search


@pytest.mark.parametrize("trained_before, to_come", [(True, 0), (False, 20_000_000)])
def test_the_largest_batch_is_at_most_one_off_and_training_goes_on(trained_before: bool, to_come: int) -> None:
    plain = limited(profiled=False, trained_before=trained_before)
    profiled = limited(trained_before=trained_before, to_come=to_come)
    profile = profiled["profile"]
    # The address space that a process uses differs by some pages from run to run; this can be one sample.
    assert abs(profile["max_batch"] - profiled["every_size"]) <= 1 and 20 < profile["max_batch"] < 80
    assert profile["memory_bound"] and [point["batch"] for point in profile["points"]][-1] == profile["max_batch"]
    check_trials(profiled["sizes"], profile["max_batch"])
    assert profiled["after"] == profiled["before"] == plain["before"]
    assert profiled["losses"] == plain["losses"] and profiled["trained"] == plain["trained"]
    predicted = (profile["memory_bytes"] - profile["state_bytes"]) // profile["sample_bytes"]
    assert predicted == pytest.approx(profile["max_batch"], abs=2)


@pytest.mark.parametrize("arguments", [{"room": 500_000}, {"to_come": 100_000_000}])
def test_memory_for_not_even_one_sample(arguments: dict[str, int]) -> None:
    answer = limited(trained_before=False, **arguments)
    profile = answer["profile"]
    assert profile["max_batch"] == 0 and not profile["points"] and profile["memory_bound"]
    assert answer["after"] == answer["before"]


def test_the_search_ends_at_the_cap() -> None:
    profile = limited(cap=13)["profile"]
    assert profile["max_batch"] == 13 and not profile["memory_bound"]
