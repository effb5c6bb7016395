"""Over NCCL, balancing needs operations of two communicators to run in the order in which they were launched."""

from __future__ import annotations

import re

import pytest

from colossal_hetero.balance.host_messages import launch_obstacle

IMPLICIT, ONE = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.mark.parametrize(
    ("nccl", "environment", "set_late"),
    [((2, 26, 2), IMPLICIT, True), ((2, 27, 5), IMPLICIT | ONE, True), ((2, 21, 5), IMPLICIT | ONE, False)],
)
def test_an_order_that_is_kept(nccl: tuple[int, ...], environment: dict[str, str], set_late: bool) -> None:
    assert launch_obstacle(nccl, environment, set_late) is None


@pytest.mark.parametrize(
    ("nccl", "environment", "set_late"),
    [
        ((2, 21, 5), IMPLICIT | ONE, True),
        ((2, 21, 5), IMPLICIT, False),
        ((2, 26, 2), ONE, True),
        ((2, 26, 2), {}, False),
    ],
)
def test_an_order_that_may_change_is_refused(
    nccl: tuple[int, ...], environment: dict[str, str], set_late: bool
) -> None:
    words = launch_obstacle(nccl, environment, set_late)
    assert words is not None
    assert re.search(r"wait for each other forever: NCCL 2\.2.*import colossal_hetero before", words)
