"""The groups of ranks, and so those of a planned run, communicate over the network that their members share."""

import os
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from colossal_hetero import PlanConfig
from colossal_hetero.planner.cluster.group_networks import Adapter, Network
from colossal_hetero.planner.cluster.topology import Channel, DeviceKind, Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.plugin.hybrid import planned_mesh as groups
from colossal_hetero.plugin.hybrid.planned_mesh import make_group, ordered_group
from tests.support.checks import on
from tests.support.machines import of_nodes
from tests.support.planned_runs import train_alone, train_planned
from tests.support.planning import make_plan, planned, unequal_plan
from tests.support.training import boost, sgd, tiny_vit


@on(1)
def if_an_interface_does_not_exist_the_error_names_it() -> None:
    with pytest.raises(RuntimeError, match="nowhere9"):
        make_group([0], Network("gloo", "Ethernet"), adapters={"Ethernet": Adapter(interface="nowhere9")})
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs torch with NCCL")
def test_options_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a group is made, ``NCCL_NET`` names its network. Its options keep the name for later communicators."""
    monkeypatch.setenv("NCCL_NET", "other")
    seen = []

    def new_group(ranks: list[int], **arguments: Any) -> Any:
        seen.append((ranks, os.environ.get("NCCL_NET"), arguments))
        return dist.GroupMember.NON_GROUP_MEMBER

    for network in (Network("nccl", "RoCE", "IB"), Network("nccl", "Ethernet", "Socket"), Network("nccl", "NVLink")):
        make_group((0, 1), network, new_group=new_group)
    assert [(ranks, net) for ranks, net, _ in seen] == [([0, 1], "IB"), ([0, 1], "Socket"), ([0, 1], "other")]
    assert [arguments["backend"] for *_, arguments in seen] == ["nccl"] * 3
    assert [arguments["pg_options"].config.net_name for *_, arguments in seen[:2]] == ["IB", "Socket"]
    assert "pg_options" not in seen[2][2] and os.environ["NCCL_NET"] == "other"


PLAN = make_plan([[[3], [2]], [[1], [0]]], (1, 3))  # A plan in which each replica is in one node


def two_nodes(kinds: tuple[str, str] = ("Ethernet", "Ethernet"), device: str = "cpu", size: int = 2) -> Topology:
    inside, devices = Channel("PCIe", 1e10), [DeviceKind(device, 10**9, 1e9)] * size
    return of_nodes((devices, inside, (Channel(nic, 1e8),)) for nic in kinds)


def check_interfaces(
    plan: Plan, topology: Topology, expected: dict[tuple[int, ...], str | None], trains: bool = False
) -> None:
    made: dict[tuple[int, ...], str | None] = {}

    def recorded(ranks: Sequence[int], **options: Any) -> Any:
        made[tuple(ranks)] = os.environ.get("GLOO_SOCKET_IFNAME")
        return ordered_group(ranks, **options)

    planning = PlanConfig(cluster=topology, adapters={"Ethernet": Adapter(interface="lo")})
    with patch.object(groups, "ordered_group", recorded):
        run = boost(planned(plan, planning=planning), tiny_vit(depth=plan.blocks), sgd)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert os.environ.pop("NCCL_SOCKET_IFNAME") == "=lo"  # NCCL reads its variable once per process, so it stays set
    assert {ranks: name for ranks, name in made.items() if len(ranks) > 1} == expected, plan.rank_order
    if trains:
        assert dist.get_backend(run.plugin.dp_group) == "gloo"
        assert train_planned(run) == pytest.approx(train_alone(plan.blocks, plan.global_batch)[0], rel=1e-5)


@on(4)
def groups_communicate_over_the_network_between_their_members() -> None:
    # The replica of rank 0 comes first.
    inside: dict[tuple[int, ...], str | None] = {(3, 2): None, (1, 0): None}
    across: dict[tuple[int, ...], str | None] = {(1, 3): "lo", (0, 2): "lo"}
    check_interfaces(PLAN, two_nodes(), across | inside, trains=True)
    check_interfaces(PLAN, two_nodes(device="A100-40"), across | inside)  # planned for GPUs
    # The nodes share no network, so none is chosen. Torch finds a connection or raises an error.
    check_interfaces(PLAN, two_nodes(("InfiniBand", "RoCE")), dict.fromkeys(across) | inside)
    # A plan that uses the first device of one node and all three of the other, so rank 1 is on device 3.
    some_devices = make_plan([[[5], [4]], [[3], [0]]], (1, 3))
    check_interfaces(some_devices, two_nodes(size=3), {(1, 3): None, (0, 2): "lo", (3, 2): None, (1, 0): "lo"})
    with pytest.raises(ValueError, match=r"the plan has device 5, but the cluster has devices 0 to 3"):
        planned(make_plan([[[0], [1]], [[2], [5]]], (1, 3)), planning=PlanConfig(cluster=two_nodes()))


@on(3)
def layers_of_unequal_replicas_are_summed_over_the_networks_of_the_plan() -> None:
    plan = unequal_plan(make_plan([[[0]]], [4], 2, 3), make_plan([[[2], [3]]], [1, 3], 2, 2))
    # The pipeline inside a node, the first block, the other blocks.
    check_interfaces(plan, two_nodes(), {(1, 2): None, (0, 1): "lo", (0, 2): "lo"})
