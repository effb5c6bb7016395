"""What benchmarks rely on: groups in one process, other plans that load checkpoints, parts of the GPU suite."""

import copy
from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from benchmarks.checkpoint.resharding import MAX_READ_SHARE, Pair, Plan, reshard
from benchmarks.gpu.part import Machine
from benchmarks.gpu.store import load_results
from benchmarks.gpu.suite import PARTS, load_part
from benchmarks.gpu.worker import measure_part
from benchmarks.in_process import shard_in_process
from tests.support.random_examples import IS_THOROUGH


def small_vit() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(img_size=16, patch_size=8, embed_dim=36, depth=2, num_heads=12, num_classes=5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_without_workloads_equals_the_whole_model(ranks: int) -> None:
    whole = small_vit()
    sharded = copy.deepcopy(whole)
    shard_in_process(sharded, ranks)
    x = torch.randn(3, 3, 16, 16)
    for model in (whole, sharded):
        model(x).square().sum().backward()
    gradients = dict(sharded.named_parameters())
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_runs_on_the_cpu(name: str, tmp_path: Path) -> None:
    part, machine = load_part(name), Machine(torch.device("cpu"), gpus=0, is_tiny=True)
    assert part.name == name
    cases = part.cases(machine)
    if not IS_THOROUGH:
        cases = [case for case in cases if not case.gpus][:1] or cases
    names = [case.name for case in cases]
    assert measure_part(part, machine, tmp_path / "part.json", 300.0, again=False, only=names)
    results = load_results(tmp_path / "part.json")
    assert results is not None
    for case in cases:
        result = results.cases[case.name]
        assert result.status == ("does not fit" if case.gpus else "done"), f"{case.name}: {result.message}"
        assert all(len(row) == len(part.columns) - 1 and "**no**" not in row for row in result.rows), result.rows
        assert result.rows or case.gpus


def test_a_checkpoint_is_loaded_under_another_plan() -> None:
    outcome = reshard(Pair("llama", Plan(dp=3, zero=1), Plan(tp=2, dp=2, zero=1), "bf16"), {})
    assert outcome.tensors and not outcome.different
    assert outcome.read_share <= MAX_READ_SHARE
