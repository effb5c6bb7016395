"""Over NCCL, balancing needs operations of two communicators to run in the order in which they were launched."""

import re

from colossal_hetero.balance.host_messages import launch_obstacle

IMPLICIT, ONE = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_an_order_that_may_change_is_refused() -> None:
    for nccl, environment, set_late, keeps_order in (
        *(((2, 26, 2), IMPLICIT, True, True), ((2, 27, 5), IMPLICIT | ONE, True, True)),
        *(((2, 21, 5), IMPLICIT | ONE, False, True), ((2, 21, 5), IMPLICIT | ONE, True, False)),
        *(((2, 21, 5), IMPLICIT, False, False), ((2, 26, 2), ONE, True, False), ((2, 26, 2), {}, False, False)),
    ):
        words = launch_obstacle(nccl, environment, set_late)
        refused = r"wait for each other forever: NCCL 2\.2.*import colossal_hetero before"
        assert words is None if keeps_order else re.search(refused, words or "")
