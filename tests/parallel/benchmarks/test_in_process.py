"""What benchmarks rely on: groups in one process, other plans that load checkpoints, parts of the GPU suite."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import colossal_hetero.layers as ours
from benchmarks.checkpoint.resharding import MAX_READ_SHARE, Pair, Plan, reshard
from benchmarks.gpu.part import Machine
from benchmarks.gpu.store import load_results
from benchmarks.gpu.suite import PARTS, load_part
from benchmarks.gpu.worker import measure_part
from benchmarks.in_process import InProcessLinear, shard_in_process
from tests.support.harness import run_ranks
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


KINDS = {
    "column": (ours.HeteroLinear1D_Col, 1, {}),
    "fused": (ours.HeteroFusedLinear1D_Col, 3, {"split_sizes": [12, 12, 12]}),
    "row": (ours.HeteroLinear1D_Row, 1, {}),
}


def keep(rank: int, columns: int) -> Any:
    kept = torch.randperm(columns, generator=torch.Generator().manual_seed(rank))[: columns // 2].sort().values
    return lambda x, weight, count: kept


def run_rank(kind: str, slow: int) -> dict[str, Tensor]:
    cls, _, options = KINDS[kind]
    torch.manual_seed(1)
    layer = cls.from_native_module(nn.Linear(24, 36), process_group=dist.group.WORLD, **options)
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == slow:
        layer.assign(ours.Workload(prune=0.5, select=keep(rank, layer.contraction_columns)))
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(2))
    x = (x.chunk(world, -1)[rank] if kind == "row" else x).clone().requires_grad_()
    layer(x).square().sum().backward()
    return {"dw": layer.weight.grad.clone(), "dx": x.grad}


def run_kinds(slow: int) -> dict[str, dict[str, Tensor]]:
    return {kind: run_rank(kind, slow) for kind in KINDS}


@pytest.mark.parametrize("world", [2, 3])
def test_a_pruned_layer_equals_that_of_separate_processes(world: int) -> None:
    slow = world - 1
    processes = run_ranks(world, run_kinds, slow)
    for kind, (_, parts, _) in KINDS.items():
        torch.manual_seed(1)
        split = "row" if kind == "row" else "column"
        layer = InProcessLinear(nn.Linear(24, 36), world, split, parts)
        shard = layer.shards[slow]
        shard.assign(ours.Workload(prune=0.5, select=keep(slow, shard.contraction_columns)))
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(2)).requires_grad_()
        layer(x).square().sum().backward()
        for rank, result in enumerate(processes):
            dw = layer.part(layer.weight.grad, rank, 1 if split == "row" else 0)
            dx = x.grad.chunk(world, -1)[rank] if split == "row" else x.grad
            for found, expected in ((result[kind]["dw"], dw), (result[kind]["dx"], dx)):
                torch.testing.assert_close(
                    found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, k=kind: f"{k}: {text}"
                )


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="36 column features cannot be divided into 1 parts over 5 ranks"):
        InProcessLinear(nn.Linear(24, 36), 5, "column")


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
