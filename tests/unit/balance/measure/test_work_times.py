"""A rank's work as a line through the loads that it has had, and its times at equal work."""

from __future__ import annotations

import pytest

from colossal_hetero.balance import RankTimes
from colossal_hetero.balance.work_times import MAX_SLOPE, MIN_SLOPE, EqualWork, WorkLine

NOISE = 0.03


def test_a_single_load_gives_a_proportional_line() -> None:
    line = WorkLine(10.0)
    line.measured(10, seconds=5.0, movable=4.0, iterations=2)
    assert [line.line(NOISE)(load) for load in (5, 10, 15)] == pytest.approx([3.0, 5.0, 7.0])
    assert line.line(NOISE, receive_factor=1.5)(15) == pytest.approx(8.0)


def test_a_second_load_corrects_the_slope_by_how_certain_it_is() -> None:
    slopes = []
    for iterations in (1, 16, 256):
        line = WorkLine(10.0)
        line.measured(10, 5.0, 4.0, iterations)
        line.measured(6, 3.8, 2.8, iterations)  # 0.3 per unit, instead of the 0.4 of a proportional line
        slopes.append(line.line(NOISE).slope)
        assert line.line(NOISE)(6) == 3.8
    assert 0.47 > slopes[0] > slopes[1] > slopes[2] == pytest.approx(0.3, abs=0.01)


def test_a_wrong_measurement_cannot_turn_the_line_over() -> None:
    line = WorkLine(10.0)
    line.measured(10, 5.0, 4.0, 8)
    line.measured(9, 8.0, 7.2, 8)
    assert line.line(NOISE).slope == pytest.approx(MIN_SLOPE * 0.8)
    line.measured(9, 1.0, 0.8, 8)
    assert line.line(NOISE).slope == pytest.approx(MAX_SLOPE * 0.8 / 9)


def test_a_change_of_speed_keeps_what_is_known_of_other_loads() -> None:
    line = WorkLine(10.0)
    line.measured(10, 5.0, 4.0, 100)
    line.measured(5, 3.2, 2.2, 100)  # 0.36 per unit
    line.speed_changed(5.4, 4.4)  # products take twice as long, the rest as long as before
    line.measured(5, 5.4, 4.4, 100)
    assert line.line(NOISE)(10) == pytest.approx(9.0, rel=0.01)
    line.forget_others()
    assert line.line(NOISE)(10) == pytest.approx(9.8)


def test_others_units_cost_what_was_measured() -> None:
    line = WorkLine(10.0)
    line.measured(10, 5.0, 5.0, 100)
    line.measured(15, 8.0, 8.0, 100)  # 0.6 per unit of others
    assert line.line(NOISE, receive_factor=3.0)(20) == pytest.approx(11.0, rel=0.02)


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
