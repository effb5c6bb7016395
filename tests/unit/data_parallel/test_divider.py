"""What global batches are divided by, from a profile: the times of equal devices are put together."""

from __future__ import annotations

import pytest

from colossal_hetero.data_parallel.batch_balancer import divider_of
from colossal_hetero.data_parallel.config import BatchConfig
from colossal_hetero.planner.batches.batch_profile import DeviceProfile
from colossal_hetero.planner.batches.closed_loop import Speed
from tests.unit.planner.batches.test_batch_profile import device, profile


def measured(factor: float) -> DeviceProfile:
    """A device whose measured times are ``factor`` times as long as those of others of its name."""
    points = [{"batch": batch, "seconds": factor * (0.05 + 0.05 * batch)} for batch in (1, 16, 64)]
    return device(points=points, max_batch=64, step_seconds=0.1 * factor)


@pytest.mark.parametrize(("factor", "samples"), [(1.06, [32, 32]), (2.0, [43, 21])])
def test_equal_devices_get_equal_parts_unless_they_differ_clearly(factor: float, samples: list[int]) -> None:
    both = profile(kinds=[measured(1.0), measured(factor)], ranks=[0, 1], links=[])
    divider = divider_of(BatchConfig(global_batch_size=64), both, 1)
    assert [share.samples for share in divider.divide((Speed(), Speed()), 64).shares] == samples
    assert divider.step_seconds == pytest.approx([0.05 * (1 + factor) / 2] * 2 if factor < 2 else [0.05, 0.1])
