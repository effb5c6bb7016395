"""The ZeRO stages that ``HeteroZeroPlugin`` tries, optimizers that it shards, and checkpoints that it loads."""

from __future__ import annotations

from typing import Any

import pytest
import timm.optim
import torch
from colossalai.interface import OptimizerWrapper
from colossalai.nn.optimizer import Lamb
from torch.nn import Parameter

from colossal_hetero.plugin.zero.elementwise_updates import ELEMENTWISE, can_be_sharded, check_sharding
from colossal_hetero.plugin.zero.zero_checkpoints import check_groups
from colossal_hetero.plugin.zero.zero_plugin import RankDevice, stages_for, stages_to_try
from colossal_hetero.plugin.zero.zero_stages import options_by_stage


def test_auto_tries_the_stages_that_the_other_arguments_allow() -> None:
    assert stages_to_try("auto", "fp32", "shared") == [0, 1, 2, 3]
    assert stages_to_try("auto", "fp16", "shared") == [0, 1, 2]
    assert stages_to_try("auto", "bf16", "per_rank") == [0, 1]
    assert stages_to_try(2, "fp16", "shared") == [2]


def test_each_stage_gets_the_options_that_its_plugin_has() -> None:
    unused, overlap = dict(find_unused_parameters=True), dict(overlap_communication=False)
    assert options_by_stage((0, 1, 2, 3), unused | overlap) == {0: unused, 1: overlap, 2: overlap, 3: {}}
    with pytest.raises(TypeError, match=r"initial_scale: .* an option of TorchDDPPlugin"):
        options_by_stage((0,), {"initial_scale": 1.0})
    with pytest.raises(TypeError, match="buckets: neither an argument of HeteroZeroPlugin"):
        options_by_stage((0, 1, 2, 3), {"buckets": 1.0})


def test_devices_of_two_kinds_do_not_shard_parameters_and_need_gloo() -> None:
    gpu, cpu, over_nccl = RankDevice("cuda", True), RankDevice("cpu", True), RankDevice("cuda", False)
    assert stages_for([0, 1, 2, 3], [over_nccl, over_nccl]) == [0, 1, 2, 3] and stages_for([3], [cpu, cpu]) == [3]
    assert stages_for([0, 1, 2, 3], [gpu, cpu]) == [0, 1, 2]
    with pytest.raises(ValueError, match="stage 3 needs devices of one kind, but the ranks have cpu and cuda"):
        stages_for([3], [gpu, cpu])
    with pytest.raises(ValueError, match=r'rank 1 .*init_process_group\("gloo"\)'):
        stages_for([0], [cpu, over_nccl])


# Optimizers ---------------------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match=r"Own cannot be sharded by ZeRO \(stage=2\).*use stage=0.*Own.is_elementwise"):
        check_sharding(Own([Parameter(VALUES)], lr=0.1), "stage", 2, distributed=True)


# Checkpoints --------------------------------------------------------------------------------------------------------


def groups(stage: int, *names: str) -> list[dict[str, Any]]:
    """One group for each text, with a parameter for each of its letters."""
    starts = [sum(map(len, names[:index])) for index in range(len(names))]
    return [
        {"params": list(range(start, start + len(each))), "param_names": list(each), "zero_stage": stage}
        for start, each in zip(starts, names, strict=True)
    ]


@pytest.mark.parametrize(
    ("saved", "present", "words"),
    [
        (groups(1, "ab", "c"), groups(1, "ab", "c"), ""),
        (groups(0, "ab", "c"), groups(2, "ab", "c"), ""),  # nothing is frozen
        (groups(3, "bca"), groups(3, "abc"), ""),  # other modules are wrapped
        (groups(0, "abc"), groups(1, "bc"), "use stage=0"),  # a is frozen
        (groups(1, "abc"), groups(3, "abc"), "use stage=1"),
        (groups(3, "abc"), groups(0, "abc"), "use stage=3.*layer checkpoints"),
        (groups(1, "abc"), groups(1, "acb"), "in another order"),
        (groups(1, "ab", "c"), groups(1, "abc"), "2 groups of 2, 1 parameters.*1 groups of 3 parameters"),
        (groups(3, "ab", "c"), groups(3, "ac", "b"), "has other ones"),
        ([{"params": [0, 1]}], groups(1, "ab"), "does not contain the names of its parameters"),
    ],
)
def test_only_the_same_parameters_in_the_same_groups_are_loaded(saved: Any, present: Any, words: str) -> None:
    if not words:
        check_groups(saved, present)
        return
    with pytest.raises(ValueError, match=words):
        check_groups(saved, present)
