"""Arguments of the plugins and what follows from a plan; members of an elastic job, and evaluations."""

import threading
from collections import Counter
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import colossalai
import pytest
import timm.optim
import torch
from colossalai.interface import OptimizerWrapper
from colossalai.nn.optimizer import Lamb
from torch import nn
from torch.nn import Parameter

from colossal_hetero.elastic.held_layers import Evaluations, Standing, has_to_repeat, is_joined_inside
from colossal_hetero.planner.cluster.group_networks import Network
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.plugin.elastic.members import FORMED, wait_for_the_first_world
from colossal_hetero.plugin.elastic.planning import with_copied_shards
from colossal_hetero.plugin.hybrid.layer_balancing import HybridOptimizerMemory
from colossal_hetero.plugin.hybrid.planned_mesh import usable_network
from colossal_hetero.plugin.hybrid.plugin_arguments import arguments_from_plan
from colossal_hetero.plugin.zero.elementwise_updates import ELEMENTWISE, can_be_sharded
from colossal_hetero.plugin.zero.zero_plugin import RankDevice, stages_for, stages_to_try
from colossal_hetero.plugin.zero.zero_stages import options_by_stage
from tests.support import elastic_jobs
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


class SharedBoard:
    """A board of threads."""

    def __init__(self) -> None:
        self._lock, self._numbers = threading.Lock(), Counter[str]()

    def count(self, name: str, number: int) -> int:
        with self._lock:
            self._numbers[name] += number
            return self._numbers[name]


def test_memory_of_copied_shards_is_planned() -> None:
    def bytes_of(profile: ModelProfile, shards: int) -> float:
        costs = profile.costs(profile.devices[0], 1, profile.times[0].micro_batch, zero_shards=shards)
        return float(costs.state_bytes.sum()) / float(costs.bucket_bytes)

    # Parameters and gradients, and two of ``shards`` parts of masters and Adam's moments.
    fp32 = elastic_jobs.profile()
    assert [bytes_of(fp32, shards) for shards in (1, 2, 4)] == pytest.approx([4, 2 + 3 / 2, 2 + 3 / 4])
    copied = with_copied_shards(fp32)
    assert [bytes_of(copied, shards) for shards in (1, 2, 3, 4, 8)] == pytest.approx([5, 5, 5, 2 + 3 / 2, 2 + 3 / 4])
    half = fp32.model_copy(update=dict(precision="bf16", state_factor=8.0))
    assert [bytes_of(with_copied_shards(half), shards) for shards in (1, 2, 4)] == pytest.approx([8, 8, 5])


def test_it_ends_without_the_others() -> None:
    board = SharedBoard()
    wait_for_the_first_world(board, 3, 0.3)
    wait_for_the_first_world(board, 3, 0.0)
    waiting = threading.Thread(target=wait_for_the_first_world, args=(board, 9, 60.0))
    waiting.start()
    board.count(FORMED, 1)
    waiting.join(30)
    assert not waiting.is_alive()
    wait_for_the_first_world(board, 9, 60.0)


def standing(evaluations: int, has_results: bool | None) -> Standing:
    return Standing(5, False, None, evaluations, has_results)


def test_who_evaluates_again() -> None:
    """For all that three ranks can have done: afterwards all have finished the same evaluations, and a rank repeats
    only together with all others that are not behind it."""
    inside = [standing(3, False), standing(3, True)]
    for ranks in product(inside, repeat=3):  # nobody is ahead
        repeats = {has_to_repeat(each, ranks) for each in ranks}
        assert repeats == {not all(each.has_results for each in ranks)}
    ahead = [standing(4, False), standing(4, True)]
    for others in product([standing(3, True), *ahead], repeat=2):  # rank 0 has got the message of evaluation 3
        for first in ahead:
            ranks = (first, *others)
            for each in ranks:
                everyone_has = all(other.evaluations == 4 and other.has_results for other in ranks)
                assert has_to_repeat(each, ranks) == (each.evaluations == 4 and not everyone_has)
    for others in product([standing(3, True), standing(4, None)], repeat=2):  # rank 0 trains already
        ranks = (standing(4, None), *others)
        assert not any(has_to_repeat(each, ranks) for each in ranks)


def test_a_process_that_joins_is_in_no_evaluation() -> None:
    new = Standing(None, False, None)
    for inside in (standing(3, False), standing(3, True)):
        assert is_joined_inside([standing(4, None), inside, new])
        assert not is_joined_inside([standing(4, None), inside])
    assert not is_joined_inside([standing(4, None), new])
    assert not is_joined_inside([new])


def test_the_same_batches_are_drawn_again() -> None:
    evaluations, seen, changes = Evaluations(), list[int](), list[bool]()

    def evaluate(batches: Iterator[int]) -> dict:
        assert not torch.is_grad_enabled()
        seen.append(next(batches))
        if len(seen) in (2, 3):
            raise RuntimeError("Connection closed by peer")
        return {"loss": seen[-1]}

    def change(error: RuntimeError) -> bool:
        changes.append(torch.is_grad_enabled() and not torch.is_inference_mode_enabled())
        assert evaluations.has_results == (len(changes) == 3)
        return len(changes) < 3

    with patch("torch.distributed.barrier") as barrier, torch.inference_mode():
        batches = iter(range(9))
        assert evaluations.run(evaluate, batches, change) == {"loss": 0}
        assert evaluations.run(evaluate, batches, change) == {"loss": 1}
        barrier.side_effect = RuntimeError("Connection closed by peer")
        assert evaluations.run(evaluate, batches, change) == {"loss": 2}
    assert seen == [0, 1, 1, 1, 2] and changes == [True] * 3
    assert (evaluations.done, evaluations.has_results) == (3, None)
