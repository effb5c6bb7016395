"""The groups of a planned run communicate over the network that their members share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from colossal_hetero import PlanConfig
from colossal_hetero.planner.cluster.group_networks import Adapter
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.plugin.hybrid import planned_mesh as groups
from colossal_hetero.plugin.hybrid.planned_mesh import ordered_group
from tests.parallel.plugin.hybrid.test_planned_run import MICRO_BATCH, MICRO_BATCHES, train_alone, train_planned
from tests.support.harness import run_ranks
from tests.support.planning import make_plan, planned, unequal_plan
from tests.support.training import boost, sgd, tiny_vit

PLAN = make_plan([[[3], [2]], [[1], [0]]], (1, 3), MICRO_BATCH, MICRO_BATCHES)
"""A plan in which each replica is in one node."""


def two_nodes(kinds: tuple[str, str] = ("Ethernet", "Ethernet"), device: str = "cpu", size: int = 2) -> Topology:
    """Two nodes of ``size`` devices each, with NICs of these kinds."""
    kind = DeviceKind(device, 10**9, 1e9)
    nodes = tuple(
        Node(f"node {number}", 0, tuple(range(size * number, size * (number + 1))), Channel("PCIe", 1e10), (nic,))
        for number, nic in enumerate(Channel(name, 1e8) for name in kinds)
    )
    return Topology(tuple(Device(kind, node=rank // size, cluster=0) for rank in range(2 * size)), nodes, ("here",))


def interfaces(plan: Plan, topology: Topology) -> dict[tuple[int, ...], str | None]:
    """The network interface of each group of several ranks, by its ranks. Equal replicas train over them."""
    made: dict[tuple[int, ...], str | None] = {}

    def recorded(ranks: Sequence[int], **options: Any) -> Any:
        made[tuple(ranks)] = os.environ.get("GLOO_SOCKET_IFNAME")
        return ordered_group(ranks, **options)

    planning = PlanConfig(cluster=topology, adapters={"Ethernet": Adapter(interface="lo")})
    with patch.object(groups, "ordered_group", recorded):
        plugin = planned(plan, planning=planning)
        run = boost(plugin, tiny_vit(depth=plan.blocks), sgd)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert os.environ.pop("NCCL_SOCKET_IFNAME") == "=lo"  # NCCL reads its variable once per process, so it stays set
    if (plan, topology) == (PLAN, two_nodes()):
        assert dist.get_backend(plugin.dp_group) == "gloo"
        expected, _ = train_alone(plan.blocks, plan.global_batch)
        assert train_planned(run) == pytest.approx(expected, rel=1e-5)
    return {ranks: name for ranks, name in made.items() if len(ranks) > 1}


def interfaces_of_each(cases: list[tuple[Plan, Topology]]) -> list[dict[tuple[int, ...], str | None]]:
    return [interfaces(plan, topology) for plan, topology in cases]


def test_groups_communicate_over_the_network_between_their_members() -> None:
    # A plan that uses the first device of one node and all three of the other, so rank 1 is on device 3.
    some_devices = make_plan([[[5], [4]], [[3], [0]]], (1, 3), MICRO_BATCH, MICRO_BATCHES)
    cases = [
        (PLAN, two_nodes()),
        (PLAN, two_nodes(device="A100-40")),  # planned for GPUs
        # The nodes share no network, so none is chosen. Torch finds a connection or raises an error.
        (PLAN, two_nodes(("InfiniBand", "RoCE"))),
        (some_devices, two_nodes(size=3)),
    ]
    expected: list[dict[tuple[int, ...], str | None]] = [
        # The replica of rank 0 comes first.
        *({(1, 3): across, (0, 2): across, (3, 2): None, (1, 0): None} for across in ("lo", "lo", None)),
        {(1, 3): None, (0, 2): "lo", (3, 2): None, (1, 0): "lo"},
    ]
    assert run_ranks(4, interfaces_of_each, cases) == [expected] * 4


def test_layers_of_unequal_replicas_are_summed_over_the_networks_of_the_plan() -> None:
    """Rank 0 is in a node of its own."""
    plan = unequal_plan(make_plan([[[0]]], [4], 2, 3), make_plan([[[2], [3]]], [1, 3], 2, 2))
    # The pipeline inside a node, the first block, the other blocks.
    assert run_ranks(3, interfaces, plan, two_nodes()) == [{(1, 2): None, (0, 1): "lo", (0, 2): "lo"}] * 3


def check_other_cluster() -> None:
    with pytest.raises(ValueError, match=r"the plan has device 5, but the cluster has devices 0 to 3"):
        planned(make_plan([[[0], [1]], [[2], [5]]], (1, 3)), planning=PlanConfig(cluster=two_nodes()))


def test_the_description_of_another_cluster_is_refused() -> None:
    run_ranks(4, check_other_cluster)
