"""Arguments of the plugins: ZeRO stages, optimizers, checkpoints, what follows from a plan, allowed plans."""

from types import SimpleNamespace
from typing import Any

import colossalai
import pytest
import timm.optim
import torch
from colossalai.interface import OptimizerWrapper
from colossalai.nn.optimizer import Lamb
from torch import nn
from torch.nn import Parameter

from colossal_hetero.planner.cluster.group_networks import Network
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.plugin.hybrid.layer_balancing import HybridOptimizerMemory
from colossal_hetero.plugin.hybrid.planned_mesh import usable_network
from colossal_hetero.plugin.hybrid.plugin_arguments import arguments_from_plan
from colossal_hetero.plugin.zero.elementwise_updates import ELEMENTWISE, can_be_sharded
from colossal_hetero.plugin.zero.zero_checkpoints import check_groups
from colossal_hetero.plugin.zero.zero_plugin import RankDevice, stages_for, stages_to_try
from colossal_hetero.plugin.zero.zero_stages import options_by_stage
from tests.support.plans import plan


def test_auto_tries_the_stages_that_arguments_and_devices_allow() -> None:
    assert stages_to_try("auto", "fp32", "shared") == [0, 1, 2, 3]
    assert stages_to_try("auto", "fp16", "shared") == [0, 1, 2]
    assert stages_to_try("auto", "bf16", "per_rank") == [0, 1]
    assert stages_to_try(2, "fp16", "shared") == [2]
    gpu, cpu, over_nccl = RankDevice("cuda", True), RankDevice("cpu", True), RankDevice("cuda", False)
    assert stages_for([0, 1, 2, 3], [over_nccl, over_nccl]) == [0, 1, 2, 3] and stages_for([3], [cpu, cpu]) == [3]
    assert stages_for([0, 1, 2, 3], [gpu, cpu]) == [0, 1, 2]
    # Each stage gets the options that its plugin has.
    unused, overlap = dict(find_unused_parameters=True), dict(overlap_communication=False)
    assert options_by_stage((0, 1, 2, 3), unused | overlap) == {0: unused, 1: overlap, 2: overlap, 3: {}}


VALUES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Own(torch.optim.SGD):
    """Elementwise, but not known."""


class Known(torch.optim.SGD):
    is_elementwise = True


class Derived(Known):
    """Not known either: it may do something else."""


def updated(kind: Any, values: torch.Tensor) -> torch.Tensor:
    parameter = Parameter(values.clone())
    optimizer = kind([parameter], lr=0.1)
    for _ in range(3):
        parameter.grad = 3 * parameter.detach() + 1
        optimizer.step()
    return parameter.detach()


KINDS = sorted((each for each in ELEMENTWISE if "colossalai" not in each.__module__), key=lambda each: each.__name__)


@pytest.mark.parametrize("kind", KINDS)
def test_known_optimizers_update_a_tensor_as_its_parts(kind: Any) -> None:
    parts = [updated(kind, part) for part in VALUES.flatten().split(7)]
    assert torch.allclose(torch.cat(parts), updated(kind, VALUES).flatten(), rtol=1e-6)


def test_other_optimizers_must_say_that_they_are_elementwise() -> None:
    for kind, distributed, expected in (
        *((torch.optim.AdamW, False, True), (Known, False, True), (Own, True, False), (Derived, True, False)),
        *((Lamb, True, True), (Lamb, False, False), (torch.optim.Adafactor, True, False)),
        (torch.optim.Adagrad, True, False),  # its states exist from the beginning
        (timm.optim.Muon, True, False),
    ):
        optimizer = kind([Parameter(VALUES)], lr=0.1)
        for each in (optimizer, OptimizerWrapper(optimizer)):
            assert can_be_sharded(each, distributed) is expected, kind


def groups(stage: int, *names: str) -> list[dict[str, Any]]:
    """One group for each text, with a parameter for each of its letters."""
    starts = [sum(map(len, names[:index])) for index in range(len(names))]
    return [
        {"params": list(range(start, start + len(each))), "param_names": list(each), "zero_stage": stage}
        for start, each in zip(starts, names, strict=True)
    ]


def test_the_same_parameters_in_the_same_groups_are_loaded() -> None:
    for saved, present in (
        (groups(1, "ab", "c"), groups(1, "ab", "c")),
        (groups(0, "ab", "c"), groups(2, "ab", "c")),  # nothing is frozen
        (groups(3, "bca"), groups(3, "abc")),  # other modules are wrapped
    ):
        check_groups(saved, present)


def test_a_script_without_a_launcher_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["/somewhere/bert.py"])
    with pytest.raises(RuntimeError, match=r"torchrun --standalone --nproc-per-node 2 bert\.py$"):
        colossalai.launch_from_torch()


def stage_of(made: Plan, **given: Any) -> int | None:
    return arguments_from_plan(made, made.replicas[0], given).get("zero_stage")


def test_the_zero_stage_follows_from_the_plan_in_stage_1_only() -> None:
    in_stage_1 = plan(precision="bf16", zero_stage=1)
    assert stage_of(in_stage_1) == stage_of(in_stage_1, zero_stage=1) == 1
    assert [stage_of(plan()), stage_of(plan(), zero_stage=0), stage_of(plan(), zero_stage=1)] == [None, 0, 1]


def test_groups_with_a_cpu_use_gloo_and_others_nccl_unless_the_user_chose_one_backend() -> None:
    gpus, with_a_cpu = Network("nccl", "InfiniBand", "IB"), Network("gloo", "Ethernet")
    for backend in ("cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"):
        assert usable_network(gpus, backend) == gpus and usable_network(with_a_cpu, backend) == with_a_cpu
    assert usable_network(gpus, "gloo") == Network("gloo", "InfiniBand")
    assert usable_network(with_a_cpu, "nccl") == Network("nccl", "Ethernet")
    assert usable_network(gpus, "cpu:gloo,cuda:gloo") is None


def test_obstacles_of_permanent_resharding() -> None:
    for is_elastic, changes, reason in (
        (True, {}, "elastic training moves whole layers"),
        (False, dict(zero_stage=1), "ZeRO stage 1"),
        (False, dict(dp_size=2), "2 replicas"),
        (False, dict(sp_size=3), "3 replicas"),
        (False, {}, None),
    ):
        plugin = SimpleNamespace(**(dict(zero_stage=0, dp_size=1, sp_size=1) | changes))
        optimizer = OptimizerWrapper(torch.optim.SGD([nn.Parameter(torch.zeros(2))]))
        model = SimpleNamespace(module=nn.Linear(2, 2))
        obstacle = HybridOptimizerMemory(plugin, model, optimizer, is_elastic).obstacle
        assert obstacle is None if reason is None else reason in str(obstacle)
