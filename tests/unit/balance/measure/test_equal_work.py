"""A rank's times at its full share, from times that it measured with another load."""

from __future__ import annotations

import pytest

from colossal_hetero.balance import RankTimes
from colossal_hetero.balance.work_times import EqualWork


def test_equal_work_scales_back_by_the_work_done() -> None:
    equal = EqualWork(2)
    assert equal.normalize(5.0, 4.0, 1.0) == RankTimes(5.0, 4.0)
    scaled = equal.normalize(2.2, 1.2, 0.25)  # a quarter of 4 s and 0.2 s of overhead
    assert scaled.work_seconds == pytest.approx(5.0) and scaled.matmul_seconds == pytest.approx(4.0)
    equal.normalize(2.2, 1.2, 0.25)
    recovered = equal.normalize(1.3, 0.3, 0.25)
    assert recovered.matmul_seconds == pytest.approx(1.0)


@pytest.mark.parametrize(
    "measured, dense", [(5.6, 4.0), (6.0, 4.0), (6.5, 4.0), (5.0, 5.0 / 1.275), (7.0, 7.0 / 1.65), (9.0, 6.0)]
)
def test_equal_work_of_a_receiver(measured: float, dense: float) -> None:
    """Half as much again: larger products may be more efficient, and others' units take some handling; 9 s are neither
    but another speed."""
    equal = EqualWork(2)
    equal.normalize(5.0, 4.0, 1.0)
    scaled = equal.normalize(1.0 + measured, measured, 1.5)
    assert scaled.matmul_seconds == pytest.approx(dense)
    assert scaled.work_seconds == pytest.approx(1.0 + dense)


def test_equal_work_without_anything_to_compare_with_is_proportional() -> None:
    assert EqualWork(2).normalize(4.0, 3.0, 1.5) == RankTimes(3.0, 2.0)
    assert EqualWork(2).normalize(2.0, 1.0, 0.5) == RankTimes(3.0, 2.0)


@pytest.mark.parametrize("bad", [0.0, -0.5, float("nan")])
def test_no_speed_without_work(bad: float) -> None:
    with pytest.raises(ValueError, match="must be above zero"):
        EqualWork(2).normalize(1.0, 0.5, bad)
