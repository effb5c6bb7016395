"""Times of gradients of pipelines that are cut differently, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from colossal_hetero.planner.candidates.gradient_times import GradientTimes
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology


@pytest.mark.parametrize("shared", [math.inf, 8e9])
def test_rings_of_unequal_cuts_share_the_bus_of_a_node(shared: float) -> None:
    """Two pipelines in a node are cut behind the first and behind the second block. Rings of two devices have two
    messages inside the node at a time, and as many rings as pipelines have stages run at once: four messages."""
    kind = DeviceKind("gpu", 10**10, 1e12)
    node = Node("n", 0, (0, 1, 2, 3), Channel("PCIe", 16e9), (), shared)
    topology = Topology((Device(kind, 0, 0),) * 4, (node,), ("here",))
    found = GradientTimes(topology).seconds(
        np.array([0]), [[(0,), (1,)], [(2,), (3,)]], [(0, 1, 4), (0, 2, 4)], np.full(4, 1e9)
    )
    # Rank 1 holds three blocks; in a ring of two, each device sends the bytes of its gradients once.
    assert found == pytest.approx(3e9 / min(16e9, shared / 4))
