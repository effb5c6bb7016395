"""Whether a loss is a mean or a sum over the samples is told from one sample and the same sample twice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.profiling.loss_check import MAX_NOISE, kind_of_loss

losses = st.floats(1e-6, 1e6) | st.floats(-1e6, -1e-6)


@given(losses, st.floats(-MAX_NOISE / 2.1, MAX_NOISE / 2.1))
def test_means_and_sums_are_told_apart_in_spite_of_noise(loss: float, noise: float) -> None:
    one = (loss * (1 - noise / 2), loss * (1 + noise / 2))
    for deviation in (-noise, 0.0, noise):
        assert kind_of_loss(one, loss * (1 + deviation)) == "mean"
        assert kind_of_loss(one, 2 * loss * (1 + deviation / 2)) == "sum"


@pytest.mark.parametrize(
    ("one", "twice", "kind"),
    [
        ((0.7, 0.7), 0.7, "mean"),
        ((0.7, 0.7), 1.4, "sum"),
        ((0.0, 0.0), 0.0, "mean"),
        ((-3.0, -3.0), -6.0, "sum"),
        ((0.703, 0.703), 0.699, "mean"),  # bfloat16
        ((0.0, 0.0), math.log(2), "unknown"),  # one sample against the others of its batch
        ((1.0, 1.0), 1.5, "unknown"),  # a sum and a penalty of the weights
        ((1.0, 1.6), 2.6, "unknown"),  # too random
        ((math.nan, math.nan), math.nan, "not finite"),
        ((1.0, 1.0), math.inf, "not finite"),
    ],
)
def test_examples(one: tuple[float, float], twice: float, kind: str) -> None:
    assert kind_of_loss(one, twice) == kind
