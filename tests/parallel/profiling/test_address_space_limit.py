"""The largest batch under a real limit of the address space. Each case runs in new processes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.harness import run_alone
from tests.support.limited import main


def limited(**arguments: Any) -> dict[str, Any]:
    """Run :mod:`tests.support.limited` in a new process."""
    return run_alone(main, **arguments)


def check_trials(sizes: list[int], largest: int) -> None:
    """Check the length of the search. ``sizes`` has a first pass of one sample, the search, and repeated sizes."""
    search: list[int] = []
    for size in sizes[1:]:
        if size in search:
            break
        search.append(size)
    assert len(search) <= 2 * math.log2(largest) + 4, search


@pytest.mark.parametrize("trained_before, to_come", [(True, 0), (False, 20_000_000)])
def test_the_largest_batch_is_found_and_training_is_unchanged(trained_before: bool, to_come: int) -> None:
    plain = limited(profiled=False, trained_before=trained_before)
    profiled = limited(trained_before=trained_before, to_come=to_come)
    profile = profiled["profile"]
    # The address space that a process uses differs by some pages between runs: up to one sample.
    assert abs(profile["max_batch"] - profiled["every_size"]) <= 1 and 20 < profile["max_batch"] < 80
    assert profile["memory_bound"] and [point["batch"] for point in profile["points"]][-1] == profile["max_batch"]
    check_trials(profiled["sizes"], profile["max_batch"])
    assert profiled["after"] == profiled["before"] == plain["before"]
    assert profiled["losses"] == plain["losses"] and profiled["trained"] == plain["trained"]
    predicted = (profile["memory_bytes"] - profile["state_bytes"]) // profile["sample_bytes"]
    assert predicted == pytest.approx(profile["max_batch"], abs=2)
