"""Arguments of the plugins: mistakes of a first try, what follows from a plan, and plans that they allow."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import colossalai
import pytest
import torch
from colossalai.interface import OptimizerWrapper
from torch import nn

from colossal_hetero.planner.cluster.group_networks import Network
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.runnable import NoPlanError, why_not_runnable
from colossal_hetero.plugin.hybrid.optimizer_slots import HybridOptimizerMemory
from colossal_hetero.plugin.hybrid.plan_agreement import best_plan
from colossal_hetero.plugin.hybrid.planned_mesh import usable_network
from colossal_hetero.plugin.hybrid.plugin_arguments import arguments_from_plan
from colossal_hetero.plugin.plan_config import PlanConfig
from tests.support.plans import plan
from tests.support.random_clusters import whole_space_problem


def test_a_script_without_a_launcher_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["/somewhere/bert.py"])
    with pytest.raises(RuntimeError, match=r"torchrun --standalone --nproc-per-node 2 bert\.py$"):
        colossalai.launch_from_torch()


# Plans --------------------------------------------------------------------------------------------------------------


def test_the_zero_stage_follows_from_the_plan_in_stage_1_only() -> None:
    def stage_of(made: Plan, **given: Any) -> int | None:
        return arguments_from_plan(made, made.replicas[0], given).get("zero_stage")

    in_stage_1 = plan(precision="bf16", zero_stage=1)
    assert stage_of(in_stage_1) == stage_of(in_stage_1, zero_stage=1) == 1
    for stage in (0, 2):
        with pytest.raises(ValueError, match=f"zero_stage={stage} contradicts the plan, which has 1; leave it out"):
            stage_of(in_stage_1, zero_stage=stage)
    assert [stage_of(plan()), stage_of(plan(), zero_stage=0), stage_of(plan(), zero_stage=1)] == [None, 0, 1]


def test_groups_with_a_cpu_use_gloo_and_others_nccl_unless_the_user_chose_one_backend() -> None:
    gpus, with_a_cpu = Network("nccl", "InfiniBand", "IB"), Network("gloo", "Ethernet")
    for backend in ("cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"):
        assert usable_network(gpus, backend) == gpus and usable_network(with_a_cpu, backend) == with_a_cpu
    assert usable_network(gpus, "gloo") == Network("gloo", "InfiniBand")
    assert usable_network(with_a_cpu, "nccl") == Network("nccl", "Ethernet")
    assert usable_network(gpus, "cpu:gloo,cuda:gloo") is None


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
                made = best_plan(planning, topology, profile)
                assert why_not_runnable(made, len(topology.devices)) is None
                found |= {"zero"} if made.zero_stage == 1 else set()
                found |= {"recompute" for replica in made.replicas for stage in replica.stages if stage.recompute}
    assert used == {"all": {"zero", "recompute"}, "recompute": {"recompute"}, "zero": {"zero"}, "none": set()}


@pytest.mark.parametrize(
    ("is_elastic", "changes", "reason"),
    [
        (True, {}, "elastic training moves whole layers"),
        (False, dict(zero_stage=1), "ZeRO stage 1"),
        (False, dict(dp_size=2), "2 replicas"),
        (False, dict(sp_size=3), "3 replicas"),
        (False, {}, None),
    ],
)
def test_obstacles_of_permanent_resharding(is_elastic: bool, changes: dict[str, int], reason: str | None) -> None:
    plugin = SimpleNamespace(**(dict(zero_stage=0, dp_size=1, sp_size=1) | changes))
    optimizer = OptimizerWrapper(torch.optim.SGD([nn.Parameter(torch.zeros(2))]))
    model = SimpleNamespace(module=nn.Linear(2, 2))
    obstacle = HybridOptimizerMemory(plugin, model, optimizer, is_elastic).obstacle
    assert obstacle is None if reason is None else reason in str(obstacle)
