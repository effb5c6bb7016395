"""Arguments of the hybrid plugin: what follows from a plan, plans that they allow, and obstacles of moving units."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from colossalai.interface import OptimizerWrapper
from torch import nn

from colossal_hetero.planner.cluster.group_networks import Network
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.runnable import NoPlanError, why_not_runnable
from colossal_hetero.plugin.elastic.planning import elastic_planning
from colossal_hetero.plugin.hybrid.optimizer_slots import HybridOptimizerMemory
from colossal_hetero.plugin.hybrid.plan_agreement import best_plan
from colossal_hetero.plugin.hybrid.planned_mesh import usable_network
from colossal_hetero.plugin.hybrid.plugin_arguments import arguments_from_plan
from colossal_hetero.plugin.plan_config import PlanConfig
from tests.support.plans import plan
from tests.support.random_clusters import random_cluster, random_model, whole_space_problem


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


def forms_of(plan: Plan) -> set[str]:
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    used = {"zero": plan.zero_stage == 1, "recompute": any(stage.recompute for stage in stages)}
    return {name for name, is_used in used.items() if is_used}


def test_recomputation_and_zero_are_used_where_they_are_allowed() -> None:
    used: dict[str, set[str]] = {"all": set(), "recompute": set(), "zero": set(), "none": set()}
    for seed in (0, 1, 10):
        topology, profile, global_batch = whole_space_problem(seed)
        for name, found in used.items():
            planning = PlanConfig(
                global_batch_size=global_batch,
                recompute=name in ("all", "recompute"),
                zero_stages=(0, 1) if name in ("all", "zero") else (0,),
            )
            with suppress(NoPlanError):
                plan = best_plan(planning, topology, profile)
                assert why_not_runnable(plan, len(topology.devices)) is None
                found |= forms_of(plan)
    assert used == {"all": {"zero", "recompute"}, "recompute": {"recompute"}, "zero": {"zero"}, "none": set()}


def test_elastic_training_has_simple_plans() -> None:
    random = np.random.default_rng(0)
    model, topology = random_model(random), random_cluster(random, 4)
    names = [node.name for node in topology.nodes]
    planning = elastic_planning({"planning": PlanConfig(global_batch_size=8)}, topology, model, names)
    assert (planning.recompute, planning.zero_stages, planning.layer_sums) == (False, (0,), True)


@pytest.mark.parametrize("stages", [1, (), (0, 2)])
def test_zero_stages_that_cannot_be_planned(stages: Any) -> None:
    with pytest.raises(ValueError, match=r"zero_stages=.* cannot be planned; use \(0,\), \(1,\) or \(0, 1\)"):
        PlanConfig(zero_stages=stages)


# Permanent re-sharding ----------------------------------------------------------------------------------------------


PLAIN = dict(zero_stage=0, dp_size=1, sp_size=1)


def memory_of(optimizer: torch.optim.Optimizer, is_elastic: bool = False, **plugin: Any) -> HybridOptimizerMemory:
    model = SimpleNamespace(module=nn.Linear(2, 2))
    return HybridOptimizerMemory(SimpleNamespace(**(PLAIN | plugin)), model, OptimizerWrapper(optimizer), is_elastic)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(is_elastic=True), "elastic training moves whole layers"),
        (dict(zero_stage=1), "ZeRO stage 1"),
        (dict(dp_size=2), "2 replicas"),
        (dict(sp_size=3), "3 replicas"),
        ({}, None),
    ],
)
def test_obstacles_of_the_plugin(options: dict[str, Any], reason: str | None) -> None:
    obstacle = memory_of(torch.optim.SGD([nn.Parameter(torch.zeros(2))]), **options).obstacle
    assert obstacle is None if reason is None else reason in str(obstacle)
