"""The backend and the environment variables of a group, chosen by the networks of its nodes."""

from __future__ import annotations

import dataclasses

import pytest

from colossal_hetero.planner.cluster.group_networks import Adapter, Network, group_network, process_environment
from colossal_hetero.planner.cluster.topology import DeviceKind
from tests.support.machines import Nodes, machines

HOLMES = machines(Nodes("InfiniBand", [2, 2]), Nodes("RoCE", [2, 2]), Nodes("Ethernet", [2, 2]))


@pytest.mark.parametrize(
    ("group", "network"),
    [
        ((0,), Network("nccl", "")),
        ((0, 1), Network("nccl", "NVLink")),
        ((0, 2), Network("nccl", "InfiniBand", "IB")),
        ((4, 5, 6, 7), Network("nccl", "RoCE", "IB")),
        ((8, 10), Network("nccl", "Ethernet", "Socket")),
        # InfiniBand and RoCE cannot communicate with each other, although NCCL calls both IB.
        ((0, 4), Network("nccl", "Ethernet", "Socket")),
        ((0, 1, 2, 8), Network("nccl", "Ethernet", "Socket")),
    ],
)
def test_networks_of_gpus(group: tuple[int, ...], network: Network) -> None:
    assert group_network(HOLMES, group) == network


def test_a_group_with_a_cpu_uses_gloo() -> None:
    devices = list(HOLMES.devices)
    devices[2] = dataclasses.replace(devices[2], kind=DeviceKind("cpu-2", 1 << 30, 1e11))
    topology = dataclasses.replace(HOLMES, devices=tuple(devices))
    assert group_network(topology, (0, 2)) == Network("gloo", "InfiniBand")
    assert group_network(topology, (2, 4)) == Network("gloo", "Ethernet")
    assert group_network(topology, (2, 3)) == Network("gloo", "NVLink")
    assert group_network(topology, (0, 3)).backend == "nccl"
    with pytest.raises(ValueError, match="needs a device"):
        group_network(HOLMES, ())
    with pytest.raises(ValueError, match="device 12"):
        group_network(HOLMES, (0, 12))


def test_environment_of_a_group_and_of_a_process() -> None:
    adapters = {"Ethernet": Adapter(interface="eth0"), "InfiniBand": Adapter(hca="=mlx5_0:1", interface="ib0")}
    assert Network("nccl", "InfiniBand", "IB").environment(adapters) == {"NCCL_NET": "IB"}
    assert Network("nccl", "Ethernet", "Socket").environment() == {"NCCL_NET": "Socket"}
    assert Network("nccl", "NVLink").environment(adapters) == {}
    assert Network("gloo", "InfiniBand").environment(adapters) == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert Network("gloo", "Ethernet").environment(adapters) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert Network("gloo", "RoCE").environment(adapters) == Network("gloo", "Ethernet").environment() == {}
    assert process_environment(adapters) == {"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_SOCKET_IFNAME": "=eth0"}
    roce = {"RoCE": Adapter(hca="mlx5_2", gid_index=3)}
    assert process_environment(roce) == {"NCCL_IB_HCA": "mlx5_2", "NCCL_IB_GID_INDEX": "3"}
    assert process_environment({"Ethernet": Adapter()}) == {}
