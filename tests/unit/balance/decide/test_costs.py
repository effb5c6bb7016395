"""What balancing costs: fits, the model's functions, and what is learned while training."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.balance import BalancePlan, Costs, RankTimes, predicted_seconds
from colossal_hetero.balance.plan import fit_affine

COSTS = Costs(
    resize_fixed=0.03,
    resize_per_share=0.05,
    migrate_fixed_seconds=0.02,
    migrate_seconds_per_share=0.1,
    receive_factor=1.1,
    communication_scale=2.0,
)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(-100, 100)), min_size=1, max_size=8))
def test_no_line_with_negative_costs_fits_better(points: list[tuple[float, float]]) -> None:
    xs, ys = (np.array(values) for values in zip(*points, strict=True))
    fixed, slope = fit_affine(xs, ys)
    assert fixed >= 0 and slope >= 0

    def error(a: float, b: float) -> float:
        return float(((a + b * xs - ys) ** 2).sum())

    found = error(fixed, slope)
    scale = 1.0 + float((ys**2).sum())
    for a in (0.0, 0.5 * fixed, fixed, 1.1 * fixed + 0.1):
        for b in (0.0, 0.5 * slope, slope, 1.1 * slope + 0.1):
            assert found <= error(a, b) + 1e-9 * scale


def test_points_that_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="at least one"):
        fit_affine([], [])
    with pytest.raises(ValueError, match="must have the same length"):
        fit_affine([1.0, 2.0], [1.0])


def test_predicted_seconds_by_hand() -> None:
    times = [RankTimes(1.0, 0.5, 0.4), RankTimes(4.0, 3.5, 0.1)]
    plan = BalancePlan(resize=(0.0, 0.25), migrate=(0.0, 0.5), receive=(0.5, 0.0))
    receiver = 1.0 + 1.1 * 0.5 * 0.5
    straggler = 0.5 + 3.5 * 0.25 + (0.03 + 0.05 * 0.25) * 3.5
    assert straggler > receiver
    assert predicted_seconds(times, COSTS, plan) == pytest.approx(straggler + 2.0 * (0.02 + 0.1 * 0.5) + 0.1)
    assert predicted_seconds(times, COSTS, BalancePlan.idle(2)) == pytest.approx(4.1)


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize(
    "name",
    ["resize_fixed", "resize_per_share", "migrate_fixed_seconds", "migrate_seconds_per_share", "receive_factor"],
)
def test_impossible_costs_are_refused(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*must be finite and not negative"):
        Costs(**{name: bad})
    for factor in ("receive_factor", "communication_scale"):
        with pytest.raises(ValueError, match=f"{factor}=0 must be positive"):
            Costs(**{factor: 0.0})


@given(st.floats(0.3, 3.5))
def test_corrections_arrive_at_what_is_measured(true_scale: float) -> None:
    costs = Costs(migrate_fixed_seconds=0.02, migrate_seconds_per_share=0.1)
    measured = true_scale * costs.phi1(0.5)
    for _ in range(30):
        costs = costs.corrected(costs.phi1(0.5), measured)
    assert costs.phi1(0.5) == pytest.approx(measured, rel=1e-3)


def test_corrections_are_smoothed_and_limited() -> None:
    assert Costs().corrected(1.0, 2.0).communication_scale == pytest.approx(math.sqrt(2.0))
    assert Costs().corrected(1.0, 1e6).communication_scale == 4.0
    assert Costs().corrected(1.0, 0.0).communication_scale == 0.25
    for predicted, measured in ((0.0, 1.0), (math.nan, 1.0), (1.0, math.nan), (1.0, -1.0)):
        assert Costs().corrected(predicted, measured) == Costs()
