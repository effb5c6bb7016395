"""Arguments and networks of the plugin that follow from a plan."""

from __future__ import annotations

import pytest

from colossal_hetero.planner.cluster.group_networks import Network
from colossal_hetero.plugin.hybrid.planned_mesh import usable_network
from colossal_hetero.plugin.hybrid.plugin_arguments import arguments_from_plan
from tests.unit.planner.plans.test_plan import plan

pytestmark = pytest.mark.unit


def test_the_zero_stage_follows_from_the_plan() -> None:
    made = plan(precision="bf16", zero_stage=1)
    for given in ({}, {"zero_stage": 1}):
        assert arguments_from_plan(made, made.replicas[0], given)["zero_stage"] == 1
    for stage in (0, 2):
        with pytest.raises(ValueError, match=f"zero_stage={stage} contradicts the plan, which has 1; leave it out"):
            arguments_from_plan(made, made.replicas[0], {"zero_stage": stage})


def test_a_plan_in_zero_stage_0_says_nothing_about_zero() -> None:
    made = plan()
    assert "zero_stage" not in arguments_from_plan(made, made.replicas[0], {})
    for stage in (0, 1):
        assert arguments_from_plan(made, made.replicas[0], {"zero_stage": stage})["zero_stage"] == stage


GPUS, WITH_A_CPU = Network("nccl", "InfiniBand", "IB"), Network("gloo", "Ethernet")


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"])
def test_groups_with_a_cpu_use_gloo_and_others_nccl(backend: str) -> None:
    assert usable_network(GPUS, backend) == GPUS
    assert usable_network(WITH_A_CPU, backend) == WITH_A_CPU


def test_one_backend_is_that_of_all_groups() -> None:
    assert usable_network(GPUS, "gloo") == Network("gloo", "InfiniBand")
    assert usable_network(WITH_A_CPU, "nccl") == Network("nccl", "Ethernet")
    assert usable_network(GPUS, "cpu:gloo,cuda:gloo") is None
