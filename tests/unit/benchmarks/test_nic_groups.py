"""Groups by network card and as launched, and the gain that is predicted for them."""

from __future__ import annotations

import pytest

from benchmarks.pipeline.nic_groups import CASES, describe, predicted_seconds


def test_groups_by_nic_stay_in_their_cluster() -> None:
    """Between clusters the network has a quarter of the speed; in the third case two rings share a card as launched."""
    for case, ratio in zip(CASES, (4, 4, 8, 4), strict=True):
        topology = describe(case, fast_megabits=400, slow_megabits=100)
        by_nic, launched = case.data_groups(True), case.data_groups(False)
        cluster = [device.cluster for device in topology.devices]
        assert all(len({cluster[rank] for rank in group}) == 1 for group in by_nic)
        assert all(len({cluster[rank] for rank in group}) == 2 for group in launched)
        seconds = [predicted_seconds(topology, groups, 16e6) for groups in (by_nic, launched)]
        assert seconds[1] / seconds[0] == pytest.approx(ratio)
