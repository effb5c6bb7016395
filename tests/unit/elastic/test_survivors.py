"""The cluster of the members that are there."""

from __future__ import annotations

import pytest

from colossal_hetero.elastic.held_layers import surviving_topology
from tests.support.machines import Nodes, machines

CLUSTER = machines(Nodes("InfiniBand", (2, 1)), Nodes("RoCE", (3,)))


def test_devices_are_those_of_the_members() -> None:
    found = surviving_topology(CLUSTER, ["node-0", "node-2", "node-2"])
    assert [node.name for node in found.nodes] == ["node-0", "node-2"]
    assert [node.devices for node in found.nodes] == [(0,), (1, 2)]
    assert [device.node for device in found.devices] == [0, 1, 1]
    assert found.channel(0, 1).kind == "Ethernet" and found.channel(1, 2).kind == "NVLink"


def test_all_members_give_the_cluster() -> None:
    assert surviving_topology(CLUSTER, ["node-0"] * 2 + ["node-1"] + ["node-2"] * 3) == CLUSTER


@pytest.mark.parametrize(
    ("nodes", "message"),
    [(["node-9"], "node node-9 is not in the cluster file"), (["node-1"] * 2, "1 devices .* but 2 members")],
)
def test_members_that_the_cluster_lacks_are_named(nodes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        surviving_topology(CLUSTER, nodes)
