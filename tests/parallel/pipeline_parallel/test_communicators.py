"""Process groups communicate over their networks."""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from colossal_hetero.planner.cluster.group_networks import Adapter, Network, group_network
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.plugin.hybrid.planned_mesh import environment, make_group, ordered_group
from tests.support.harness import run_ranks
from tests.support.machines import Nodes, machines


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


def sum_over(groups: tuple[tuple[int, ...], ...], topology: Topology, adapters: dict[str, Adapter]) -> list[Any]:
    """For each group of this rank: its ranks, the sum of their numbers, and both addresses of its new connections."""
    before_all = dict(os.environ)
    found = []
    for ranks in groups:
        before = own_connections()
        group = make_group(ranks, group_network(topology, ranks), adapters=adapters, new_group=ordered_group)
        if dist.get_rank() not in ranks:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            continue
        ends = {(own, peer) for own, _, peer, _ in own_connections() - before}
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total, group=group)
        found.append((ranks, total.item(), ends))
    assert dict(os.environ) == before_all
    return found


@pytest.mark.skipif(not OTHERS, reason="needs an interface besides the loopback")
def test_each_group_connects_over_its_own_interface() -> None:
    """Two clusters of two CPU nodes, a stage in each: data-parallel groups connect over "RDMA", which is the loopback
    here, and pipelines over "Ethernet", which is another interface."""
    topology = machines(Nodes("RoCE", [1, 1]), Nodes("InfiniBand", [1, 1]), device="cpu")
    groups = ((0, 1), (2, 3), (0, 2), (1, 3))
    assert {group_network(topology, group).backend for group in groups} == {"gloo"}
    adapters = {
        "RoCE": Adapter(interface="lo"),
        "InfiniBand": Adapter(interface="lo"),
        "Ethernet": Adapter(interface=OTHERS[0]),
    }
    results = run_ranks(4, sum_over, groups, topology, adapters)
    fast, slow = addresses()["lo"], addresses()[OTHERS[0]]
    for rank, found in enumerate(results):
        assert [ranks for ranks, *_ in found] == [group for group in groups if rank in group]
        (data, data_sum, data_ends), (pipeline, pipeline_sum, pipeline_ends) = found
        assert (data_sum, pipeline_sum) == (sum(data), sum(pipeline))
        assert data_ends == {(fast, fast)}
        assert pipeline_ends == {(slow, slow)}


def fail_to_connect() -> tuple[str, bool]:
    with pytest.raises(RuntimeError) as raised:
        make_group([0], Network("gloo", "Ethernet"), adapters={"Ethernet": Adapter(interface="nowhere9")})
    return str(raised.value), "GLOO_SOCKET_IFNAME" in os.environ


def test_if_an_interface_does_not_exist_the_error_names_it() -> None:
    ((words, left),) = run_ranks(1, fail_to_connect)
    assert "nowhere9" in words
    assert not left


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
    names = [arguments["pg_options"].config.net_name for *_, arguments in seen[:2]]
    assert names == ["IB", "Socket"]
    assert "pg_options" not in seen[2][2]
    assert os.environ["NCCL_NET"] == "other"


def test_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BEFORE", "1")
    with pytest.raises(KeyError), environment({"SET_BEFORE": "2", "NOT_SET_BEFORE": "3"}):
        assert (os.environ["SET_BEFORE"], os.environ["NOT_SET_BEFORE"]) == ("2", "3")
        raise KeyError
    assert os.environ["SET_BEFORE"] == "1" and "NOT_SET_BEFORE" not in os.environ
