"""The groups of ranks, and so those of a planned run, communicate over the network that their members share."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist

from colossal_hetero import PlanConfig
from colossal_hetero.planner.cluster.group_networks import Adapter, Network, group_network
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.plugin.hybrid import planned_mesh as groups
from colossal_hetero.plugin.hybrid.planned_mesh import environment, make_group, ordered_group
from tests.support.checks import Checks
from tests.support.machines import Nodes, machines
from tests.support.planned_runs import train_alone, train_planned
from tests.support.planning import make_plan, planned, unequal_plan
from tests.support.training import boost, sgd, tiny_vit

checks = Checks()

# Sockets ------------------------------------------------------------------------------------------------------------


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface that is up."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = {}
    for name, given in psutil.net_if_addrs().items():
        internet = [address.address for address in given if address.family == socket.AF_INET]
        if name in up and internet:
            found[name] = internet[0]
    return found


OTHERS = [name for name in addresses() if name != "lo"]


def own_connections() -> set[tuple[str, int, str, int]]:
    """Connections of this process, as (local address, local port, remote address, remote port)."""
    found = psutil.Process().net_connections("tcp")
    return {(*one.laddr, *one.raddr) for one in found if one.status == psutil.CONN_ESTABLISHED}


@checks.on(4)
def each_group_connects_over_its_own_interface() -> None:
    """Two clusters of two CPU nodes, a stage in each: data-parallel groups connect over "RDMA", which is the loopback
    here, and pipelines over "Ethernet", which is another interface."""
    if not OTHERS:
        return  # this machine has no interface besides the loopback
    topology = machines(Nodes("RoCE", [1, 1]), Nodes("InfiniBand", [1, 1]), device="cpu")
    loopback, before_all = Adapter(interface="lo"), dict(os.environ)
    adapters = {"RoCE": loopback, "InfiniBand": loopback, "Ethernet": Adapter(interface=OTHERS[0])}
    for ranks, interface in (((0, 1), "lo"), ((2, 3), "lo"), ((0, 2), OTHERS[0]), ((1, 3), OTHERS[0])):
        network, before = group_network(topology, ranks), own_connections()
        assert network.backend == "gloo"
        group = make_group(ranks, network, adapters=adapters, new_group=ordered_group)
        if dist.get_rank() not in ranks:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            continue
        address = addresses()[interface]
        assert {(own, peer) for own, _, peer, _ in own_connections() - before} == {(address, address)}
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(ranks)
    assert dict(os.environ) == before_all


@checks.on(1)
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


def test_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BEFORE", "1")
    with pytest.raises(KeyError), environment({"SET_BEFORE": "2", "NOT_SET_BEFORE": "3"}):
        assert (os.environ["SET_BEFORE"], os.environ["NOT_SET_BEFORE"]) == ("2", "3")
        raise KeyError
    assert os.environ["SET_BEFORE"] == "1" and "NOT_SET_BEFORE" not in os.environ


# Planned runs -------------------------------------------------------------------------------------------------------


PLAN = make_plan([[[3], [2]], [[1], [0]]], (1, 3))
"""A plan in which each replica is in one node."""


def two_nodes(kinds: tuple[str, str] = ("Ethernet", "Ethernet"), device: str = "cpu", size: int = 2) -> Topology:
    """Two nodes of ``size`` devices each, with NICs of these kinds."""
    kind = DeviceKind(device, 10**9, 1e9)
    nodes = tuple(
        Node(f"node {number}", 0, tuple(range(size * number, size * (number + 1))), Channel("PCIe", 1e10), (nic,))
        for number, nic in enumerate(Channel(name, 1e8) for name in kinds)
    )
    return Topology(tuple(Device(kind, node=rank // size, cluster=0) for rank in range(2 * size)), nodes, ("here",))


def check_interfaces(
    plan: Plan, topology: Topology, expected: dict[tuple[int, ...], str | None], trains: bool = False
) -> None:
    """The network interface of each group of several ranks, by its ranks."""
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


@checks.on(4)
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


@checks.on(3)
def layers_of_unequal_replicas_are_summed_over_the_networks_of_the_plan() -> None:
    """Rank 0 is in a node of its own."""
    plan = unequal_plan(make_plan([[[0]]], [4], 2, 3), make_plan([[[2], [3]]], [1, 3], 2, 2))
    # The pipeline inside a node, the first block, the other blocks.
    check_interfaces(plan, two_nodes(), {(1, 2): None, (0, 1): "lo", (0, 2): "lo"})


test_on_ranks = checks.test()
