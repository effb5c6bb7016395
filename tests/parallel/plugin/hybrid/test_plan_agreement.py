"""With ``plan="auto"`` the plugin plans from a cluster and a profile when it is made. All ranks get the same plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from colossal_hetero import PlanConfig
from colossal_hetero.planner.cluster.cluster_file import save_cluster
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.runnable import NoPlanError
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile, save_profile
from colossal_hetero.plugin.hybrid import plan_agreement
from tests.parallel.plugin.hybrid.test_planned_run import train_alone, train_planned
from tests.support.checks import Checks
from tests.support.harness import run_ranks
from tests.support.layer_profiles import layer_times
from tests.support.planning import planned
from tests.support.training import boost, sgd, tiny_vit

BLOCKS, GLOBAL_BATCH = 6, 16
CPU = DeviceKind("cpu", 10**9, 1e9)
checks = Checks()


def cluster(speeds: tuple[float, ...]) -> Topology:
    """One node of CPUs with these speeds, relative to full speed."""
    memory = Channel("shared memory", 1e9, 1e-5)
    devices = tuple(Device(CPU, node=0, cluster=0, speed=speed) for speed in speeds)
    node = Node("here", 0, tuple(range(len(speeds))), memory, (Channel("Ethernet", 1e8, 1e-4),))
    return Topology(devices, (node,), ("here",))


def profile(megabytes: int = 40) -> ModelProfile:
    """A profile of equal blocks, which take a millisecond per sample forward, for micro-batches of 1 and 2.

    If a block has 40 MB of parameters, summing gradients over replicas takes long, so a pipeline is the best plan.
    """
    layers = BLOCKS + 2
    times = tuple(layer_times("cpu", (0.0, *(1e-3 * size,) * BLOCKS, 0.0), micro_batch=size) for size in (1, 2))
    sizes = LayerSizes(
        parameter_bytes=(0, *(megabytes * 10**6,) * BLOCKS, 0),
        activation_bytes=(1000,) * layers,
        output_bytes=(1000,) * (layers - 1) + (0,),
    )
    return ModelProfile(name="tiny ViT", times=times, sizes=(sizes,))


def auto_plan(planning: PlanConfig, **options: Any) -> Plan:
    """Make a plugin and return its plan. The plugin is not used further.

    Its groups are destroyed only after all ranks have made them. If a group is destroyed while another rank still
    connects to it, Gloo may wait forever.
    """
    plugin = planned("auto", planning=planning, **options)
    dist.barrier()
    assert plugin.plan is not None
    return plugin.plan


def check_auto(planning: PlanConfig, expected: list[float]) -> tuple[list[str], Any]:
    printed: list[str] = []
    with patch.object(plan_agreement, "print_words", printed.append):
        plugin = planned("auto", planning=planning)
    run = boost(plugin, tiny_vit(depth=BLOCKS), sgd)
    assert train_planned(run) == pytest.approx(expected, rel=1e-5)
    return printed, plugin.plan


@pytest.mark.parametrize("from_files", [False, True])
def test_plan_auto_plans_and_trains(from_files: bool, tmp_path: Path) -> None:
    topology, layers = cluster((1.0, 0.5)), profile()
    save_cluster(topology, tmp_path / "cluster.toml")
    save_profile(layers, tmp_path / "profile.json")
    planning = PlanConfig(
        cluster=tmp_path / "cluster.toml" if from_files else topology,
        profile=str(tmp_path / "profile.json") if from_files else layers,
        global_batch_size=GLOBAL_BATCH,
    )
    expected, _ = train_alone(BLOCKS, GLOBAL_BATCH)
    (printed, plan), (other_printed, other_plan) = run_ranks(2, check_auto, planning, expected)
    assert plan == other_plan and len(printed) == 1 and other_printed == []
    # The rank with half the speed has half as many blocks as the other. Small micro-batches make the bubble small.
    layers_of = {stage.ranks: stage.blocks[1] - stage.blocks[0] for stage in plan.replicas[0].stages}
    assert layers_of == {(0,): 4, (1,): 2} and plan.micro_batch == 1
    assert "micro-batch 1 × 16" in printed[0]


@checks.on(2)
def check_settings() -> None:
    settings: dict[str, Any] = dict(global_batch_size=GLOBAL_BATCH, method="uniform", micro_batch_sizes=(2,))
    plan = auto_plan(PlanConfig(cluster=cluster((1.0, 0.5)), profile=profile(), unequal=False, **settings))
    assert plan.layers_per_stage == (3, 3) and (plan.method, plan.micro_batch) == ("uniform", 2)
    # The times measured on each rank are used, not the speed in the cluster file.
    layers = profile()
    slow = [
        each.model_copy(
            update={
                "device": "cpu-2",
                "forward_seconds": tuple(5 * seconds for seconds in each.forward_seconds),
                "backward_seconds": tuple(5 * seconds for seconds in each.backward_seconds),
            }
        )
        for each in layers.times
    ]
    measured = layers.model_copy(update={"times": (*layers.times, *slow), "rank_devices": ("cpu", "cpu-2")})
    planning = PlanConfig(cluster=cluster((1.0, 1.0)), profile=measured, global_batch_size=GLOBAL_BATCH)
    plan = auto_plan(planning)
    layers_of = {stage.ranks: stage.blocks[1] - stage.blocks[0] for stage in plan.replicas[0].stages}
    assert layers_of == {(0,): 5, (1,): 1}


@checks.on(2)
def check_refused() -> None:
    planning = PlanConfig(cluster=cluster((1.0,) * 3), profile=profile(), global_batch_size=GLOBAL_BATCH)
    with pytest.raises(ValueError, match="the cluster has 3 devices, but 2 ranks were started; start one rank per"):
        planned("auto", planning=planning)
    with pytest.raises(ValueError, match="cluster=None"):
        planned("auto", planning=PlanConfig(profile=profile(), global_batch_size=GLOBAL_BATCH))
    # If rank 0 cannot read a file, all ranks raise the error, and none waits.
    missing = PlanConfig(cluster="no-such.toml", profile=profile(), global_batch_size=GLOBAL_BATCH)
    with pytest.raises(ValueError, match=r"no-such\.toml"):
        planned("auto", planning=missing)
    # Without the slow rank a plan would be faster, but every rank that was started must have a place in it.
    speeds = PlanConfig(cluster=cluster((1.0, 0.01)), profile=profile(), global_batch_size=GLOBAL_BATCH)
    assert auto_plan(speeds).world_size == 2
    single = PlanConfig(cluster=cluster((1.0, 1.0)), profile=profile(20), global_batch_size=1)
    with pytest.raises(ValueError, match="no plan uses all 2 devices; the fastest plan uses 1"):
        planned("auto", planning=single, pp_size=1)


@checks.on(2)
def check_sizes() -> None:
    # Equal devices, and gradients that take no time to sum: replicas are the best plan, unless stages are asked for.
    planning = PlanConfig(cluster=cluster((1.0, 1.0)), profile=profile(0), global_batch_size=GLOBAL_BATCH)
    assert len(auto_plan(planning).replicas) == 2
    plan = auto_plan(planning, pp_size=2)
    assert len(plan.replicas) == 1 and plan.layers_per_stage == (3, 3)
    with pytest.raises(ValueError, match="tensor"):
        planned("auto", planning=planning, tp_size=2)


@checks.on(2)
def check_replicas_that_differ() -> None:
    # Replicas are the best plan (see check_sizes), and the slow rank takes a third of the samples.
    settings: dict[str, Any] = dict(cluster=cluster((1.0, 0.5)), profile=profile(0), global_batch_size=24)
    plan = auto_plan(PlanConfig(**settings))
    samples = {replica.stages[0].ranks: replica.micro_batches * plan.micro_batch for replica in plan.replicas}
    assert samples == {(0,): 16, (1,): 8}
    # Equal replicas are made if they are asked for, or if the other arguments need them.
    assert auto_plan(PlanConfig(**settings, unequal=False)).symmetric
    assert auto_plan(PlanConfig(**settings), pp_size=1).symmetric
    assert auto_plan(PlanConfig(**settings), overlap_allgather=True).symmetric


def test_the_size_of_micro_batches_is_kept_if_there_is_a_plan_with_it() -> None:
    def agree(plan: str, planning: PlanConfig, tp_size: int | None) -> Any:
        if planning.micro_batch_sizes == (4,):
            raise NoPlanError("the model does not fit")
        return planning.micro_batch_sizes

    planning = PlanConfig(micro_batch_sizes=(1, 2, 4))
    with patch.object(plan_agreement, "agree_on_plan", agree):
        found = [plan_agreement.agree_on_next_plan(planning, None, size) for size in (2, 4, None)]
    assert found == [(2,), (1, 2, 4), (1, 2, 4)]


test_plan_auto = checks.test()
