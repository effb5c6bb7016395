"""Over NCCL, balancing needs operations of two communicators to run in the order in which they were launched."""

from __future__ import annotations

import pytest

from colossal_hetero.balance.host_messages import check_launch_order

IMPLICIT, ONE = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.mark.parametrize(
    ("nccl", "environment", "set_late"),
    [((2, 26, 2), IMPLICIT, True), ((2, 27, 5), IMPLICIT | ONE, True), ((2, 21, 5), IMPLICIT | ONE, False)],
)
def test_an_order_that_is_kept(nccl: tuple[int, ...], environment: dict[str, str], set_late: bool) -> None:
    check_launch_order(nccl, environment, set_late)


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
    with pytest.raises(RuntimeError, match=r"wait for each other forever: NCCL 2\.2.*import colossal_hetero before"):
        check_launch_order(nccl, environment, set_late)
