"""The ZeRO stages that ``HeteroZeroPlugin`` tries, by its arguments and the ranks' devices."""

from __future__ import annotations

from typing import Any

import pytest

from colossal_hetero.plugin.zero.zero_plugin import RankDevice, stages_for, stages_to_try
from colossal_hetero.plugin.zero.zero_stages import options_by_stage


@pytest.mark.parametrize("stage", [4, -1, "3", None, True, 1.5])
def test_a_stage_that_does_not_exist(stage: Any) -> None:
    with pytest.raises(ValueError, match=r'is not a ZeRO stage; use 0, 1, 2, 3 or "auto"'):
        stages_to_try(stage, "fp32", "shared")


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation", "words"),
    [
        (1, "fp8", "shared", "precision='fp8' is not one of fp32, fp16, bf16"),
        (3, "fp16", "shared", "precision='fp16' is not available at stage 3; use fp32 or bf16"),
        (2, "fp32", "per_rank", 'accumulation="per_rank" needs stage 0 or 1, not 2'),
        (3, "bf16", "per_rank", 'accumulation="per_rank" needs stage 0 or 1, not 3'),
    ],
)
def test_combinations_that_do_not_exist(stage: int, precision: str, accumulation: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stages_to_try(stage, precision, accumulation)


def test_auto_tries_the_stages_that_the_other_arguments_allow() -> None:
    assert stages_to_try("auto", "fp32", "shared") == [0, 1, 2, 3]
    assert stages_to_try("auto", "fp16", "shared") == [0, 1, 2]
    assert stages_to_try("auto", "bf16", "per_rank") == [0, 1]
    assert stages_to_try(2, "fp16", "shared") == [2]


def test_each_stage_gets_the_options_that_its_plugin_has() -> None:
    given = dict(find_unused_parameters=True, overlap_communication=False)
    unused, overlap = dict(find_unused_parameters=True), dict(overlap_communication=False)
    assert options_by_stage((0, 1, 2, 3), given) == {0: unused, 1: overlap, 2: overlap, 3: {}}
    for stages, option, words in (
        ((0,), "initial_scale", r"initial_scale: .* an option of TorchDDPPlugin"),
        ((0, 1, 2, 3), "buckets", "buckets: neither an argument of HeteroZeroPlugin"),
    ):
        with pytest.raises(TypeError, match=words):
            options_by_stage(stages, {option: 1.0})


GPU, CPU = RankDevice("cuda", True), RankDevice("cpu", True)
GPU_OVER_NCCL = RankDevice("cuda", False)


def test_devices_of_one_kind_can_run_every_stage() -> None:
    assert stages_for([0, 1, 2, 3], [GPU_OVER_NCCL, GPU_OVER_NCCL]) == [0, 1, 2, 3]
    assert stages_for([3], [CPU, CPU]) == [3]


def test_gpus_and_cpus_do_not_shard_parameters() -> None:
    assert stages_for([0, 1, 2, 3], [GPU, CPU]) == [0, 1, 2]
    with pytest.raises(ValueError, match="stage 3 needs devices of one kind, but the ranks have cpu and cuda"):
        stages_for([3], [GPU, CPU])


def test_gpus_and_cpus_need_gloo() -> None:
    with pytest.raises(ValueError, match=r'rank 1 .*init_process_group\("gloo"\)'):
        stages_for([0], [CPU, GPU_OVER_NCCL])
