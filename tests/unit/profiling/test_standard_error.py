"""The standard error of a typical value, compared with how much that value differs between samples."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from colossal_hetero.profiling.progress import relative_error

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("of_median", [True, False])
@pytest.mark.parametrize("count", [9, 40, 200])
def test_typical_values_differ_as_much_as_it_says(of_median: bool, count: int) -> None:
    random = np.random.default_rng(count)
    samples = random.normal(2.0, 0.1, (3000, count))
    typical = np.median(samples, axis=1) if of_median else samples.mean(axis=1)
    errors = [relative_error(each.tolist(), of_median=of_median) for each in samples]
    assert statistics.fmean(errors) == pytest.approx(typical.std() / 2.0, rel=0.15)


def test_a_few_disturbed_passes_do_not_change_that_of_the_median() -> None:
    values = np.random.default_rng(1).normal(2.0, 0.1, 100).tolist()
    disturbed = [*values[:97], 50.0, 60.0, 70.0]
    quiet = relative_error(values, of_median=True)
    assert relative_error(disturbed, of_median=True) == pytest.approx(quiet, rel=0.15)
    assert relative_error(disturbed, of_median=False) > 10 * quiet


def test_two_values_say_nothing() -> None:
    assert relative_error([1.0, 2.0], of_median=True) == 0.0
