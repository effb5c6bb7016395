"""Which ZeRO stages can run on ranks with devices of several kinds."""

from __future__ import annotations

import pytest

from colossal_hetero.plugin.zero.zero_plugin import RankDevice, stages_for

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
