"""The network of a plan's group, as the ranks that run the plan can use it."""

from __future__ import annotations

import pytest

from colossal_hetero.planner.cluster.group_networks import Network
from colossal_hetero.plugin.hybrid.planned_mesh import usable_network

GPUS, WITH_A_CPU = Network("nccl", "InfiniBand", "IB"), Network("gloo", "Ethernet")


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"])
def test_groups_with_a_cpu_use_gloo_and_others_nccl(backend: str) -> None:
    assert usable_network(GPUS, backend) == GPUS
    assert usable_network(WITH_A_CPU, backend) == WITH_A_CPU


def test_one_backend_is_that_of_all_groups() -> None:
    assert usable_network(GPUS, "gloo") == Network("gloo", "InfiniBand")
    assert usable_network(WITH_A_CPU, "nccl") == Network("nccl", "Ethernet")
    assert usable_network(GPUS, "cpu:gloo,cuda:gloo") is None
