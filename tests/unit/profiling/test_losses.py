"""Kind of a loss, from the losses of a few samples: mean or sum, and if it is a mean over samples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.profiling.loss_check import MAX_NOISE, kind_of_loss
from colossal_hetero.profiling.loss_mean import Evidence, Pair, why_not_samples


@pytest.mark.parametrize(
    ("pairs", "leaves_out", "why"),
    [
        ([Pair(0.5, 0.001), Pair(0.501, 0.001)], False, None),
        ([Pair(0.5, 0.001), Pair(0.46, 0.001)], False, ""),  # weights 1 and 1.17
        ([Pair(0.5, 0.001), Pair(0.46, 0.03)], False, None),  # rounding in bfloat16
        ([Pair(0.5, 0.001), Pair(0.2, 0.2)], False, None),  # shows nothing
        ([Pair(0.2, 0.2), Pair(math.nan, math.inf)], False, "no samples could be compared"),  # at ln(classes)
        ([Pair(math.nan, 0.0)], False, ""),  # a sum, or samples compared with each other
        ([Pair(0.75, 0.001)], True, ""),
        ([Pair(0.5, 0.001)], True, "may leave labels out"),  # perhaps all equally many
    ],
)
def test_pairs_show_a_mean_over_samples_or_another_one_or_nothing(
    pairs: list[Pair], leaves_out: bool, why: str | None
) -> None:
    found = why_not_samples([Evidence(), Evidence(tuple(pairs), leaves_out)])
    assert found == why if not why else found is not None and why in found
    assert why_not_samples([Evidence(tuple(pairs)), Evidence(is_random=True)]) is not None


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
def test_examples_of_means_and_sums(one: tuple[float, float], twice: float, kind: str) -> None:
    assert kind_of_loss(one, twice) == kind
