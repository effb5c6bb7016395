"""Kind of a loss, from the losses of a few samples: mean or sum, and what it is a mean over."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.profiling.loss_check import MAX_NOISE, kind_of_loss
from colossal_hetero.profiling.loss_mean import Evidence, Pair, decide

CLASSES = 5


def pair(share: float, error: float = 0.001, **shares: float) -> Pair:
    return Pair(share, error, {"samples": 0.5, **shares})


@pytest.mark.parametrize(
    "pairs, expected",
    [
        ([pair(0.5), pair(0.501)], "samples"),
        ([pair(0.5), pair(0.46)], "other"),  # weights 1 and 1.17
        ([pair(0.5), pair(0.46, error=0.03)], "samples"),  # rounding in bfloat16
        ([pair(0.5), pair(0.2, error=0.2)], "samples"),  # shows nothing
        ([pair(0.2, error=0.2), pair(math.nan, error=math.inf)], "undecided"),  # at ln(classes)
        ([pair(math.nan, error=0.0)], "other"),  # a sum, or samples compared with each other
        ([pair(0.75, tokens=0.75, next_tokens=0.8), pair(0.4, tokens=0.4, next_tokens=0.3)], "tokens"),
        ([pair(0.8, tokens=0.75, next_tokens=0.8), pair(0.3, tokens=0.4, next_tokens=0.3)], "next_tokens"),
        ([pair(0.75, tokens=0.75, next_tokens=0.75)], "undecided"),
        ([pair(0.5, tokens=0.75)], "samples"),
        ([pair(0.5, tokens=0.5)], "undecided"),  # some samples have ignored labels, but all equally many
    ],
)
def test_pairs_decide_or_ask(pairs: list[Pair], expected: str) -> None:
    rivals = frozenset({"tokens", "next_tokens"})
    assert decide([Evidence((), rivals=rivals), Evidence(tuple(pairs), rivals=rivals)]).kind == expected


def test_the_experiment_with_labels_must_agree_with_the_pairs_of_all_ranks() -> None:
    agrees = Evidence((pair(0.8, tokens=0.8),), "tokens")
    assert decide([agrees, agrees]).kind == "tokens"
    assert decide([agrees, Evidence((pair(0.5, tokens=0.8),), "tokens")]).kind == "other"
    assert decide([agrees, Evidence((pair(0.8, tokens=0.8),), "next_tokens")]).kind == "other"
    assert decide([agrees, Evidence(is_random=True)]).kind == "undecided"


def test_a_known_count_is_suggested() -> None:
    found = decide([Evidence((Pair(0.3, 0.001, {"samples": 0.5, "the weights of classes": 0.3}),))])
    assert found.kind == "other" and "the weights of classes" in found.reason


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
