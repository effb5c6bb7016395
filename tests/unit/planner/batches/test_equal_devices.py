"""Equal devices get equal parts, although their measured times differ by noise."""

from __future__ import annotations

import numpy as np
import pytest

from colossal_hetero.planner.batches.allocation import allocate
from colossal_hetero.planner.batches.equal_devices import MAX_SPREAD, equal_devices, joint_curves, joint_seconds
from colossal_hetero.planner.batches.time_curve import Curve


def curve(factor: float, max_batch: int = 64, min_batch: int = 1) -> Curve:
    return Curve.from_seconds(factor * (0.2 + 0.1 * np.arange(1, max_batch + 1)), min_batch)


def noisy(seed: int, max_batch: int = 64) -> Curve:
    """A curve through points of which each has an error of up to 4 %."""
    random = np.random.default_rng(seed)
    sizes = (1, 2, 8, 16, 32, 64)
    return Curve.through({size: (0.2 + 0.1 * size) * random.uniform(0.96, 1.04) for size in sizes}, max_batch)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_equal_devices_get_equal_parts_in_spite_of_noise(ranks: int, stage: int) -> None:
    unequal = 0
    for seed in range(10):
        curves = [noisy(ranks * seed + rank) for rank in range(ranks)]
        groups = equal_devices(["gpu"] * ranks, curves)
        divided = allocate(joint_curves(curves, groups), 48 * ranks, stage)
        assert [share.samples for share in divided.shares] == [48] * ranks
        unequal += len({share.samples for share in allocate(curves, 48 * ranks, stage).shares}) > 1
    assert unequal > 0  # without joint curves, noise divides unequally


def test_devices_that_differ_by_more_than_noise_keep_their_curves() -> None:
    curves = [curve(1.0), curve(2.0), curve(1.02), curve(2.0 * (1 + 0.5 * MAX_SPREAD))]
    groups = equal_devices(["gpu"] * 4, curves)
    assert groups == [[0, 2], [1, 3]]
    joint = joint_curves(curves, groups)
    assert joint[0] is joint[2] and joint[1] is joint[3]
    np.testing.assert_allclose(joint[0].seconds, 1.01 * curves[0].seconds)


def test_a_group_is_never_wider_than_the_spread() -> None:
    factors = [1.0, 1.08, 1.16, 1.24]
    groups = equal_devices(["gpu"] * 4, [curve(factor) for factor in factors])
    assert groups == [[0, 1], [2, 3]]


def test_devices_of_different_names_are_never_equal() -> None:
    assert equal_devices(["a", "b", "a"], [curve(1.0)] * 3) == [[0, 2], [1]]


def test_each_device_keeps_its_largest_micro_batch() -> None:
    curves = [curve(1.0, 64, 2), curve(1.03, 40, 2), curve(1.04, 64, 2)]
    joint = joint_curves(curves, equal_devices(["gpu"] * 3, curves))
    assert [each.max_batch for each in joint] == [64, 40, 64]
    assert [each.min_batch for each in joint] == [2, 2, 2]
    assert joint[0] is joint[2]
    np.testing.assert_array_equal(joint[0].seconds[:41], joint[1].seconds)
    # The shorter curve was slower. Where it ends, the joint one does not become faster.
    np.testing.assert_allclose(joint[0].seconds, curve(np.mean([1.0, 1.03, 1.04]), 64, 2).seconds)


def test_a_device_that_holds_nothing_is_alone_with_its_kind() -> None:
    empty = Curve(np.ones(1))
    joint = joint_curves([curve(1.0), empty], equal_devices(["gpu", "cpu"], [curve(1.0), empty]))
    assert [each.max_batch for each in joint] == [64, 0]


def test_seconds_of_a_group_are_its_mean() -> None:
    assert joint_seconds([1.0, 2.0, 4.0], [[0, 2], [1]]) == [2.5, 2.0, 2.5]
