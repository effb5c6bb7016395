"""HeteroHybridParallelPlugin with uneven batches, on replicas of one or more ranks, compared with one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from colossal_hetero import BalanceConfig, BatchConfig, HeteroHybridParallelPlugin
from colossal_hetero.layers import hetero_policy
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import CLASSES, tiny_vit
from tests.support.zero_runs import fit, global_batches, sizes_by_rank, unmeasured

SAMPLES = 17
GLOBAL_BATCH = 7
STEPS = 3  # an epoch, whose last global batch has three samples


class Images(Dataset):
    images = torch.randn(SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % CLASSES


def train(
    division: Sequence[Sequence[int]], tp_size: int, options: dict[str, Any], clip: float = 0.0
) -> dict[str, Any]:
    plugin = HeteroHybridParallelPlugin(
        tp_size, 1, batches=BatchConfig(global_batch_size=GLOBAL_BATCH, max_micro_batch=7), **options
    )
    loader = plugin.prepare_dataloader(Images())
    model = tiny_vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, _, loader, _ = Booster(plugin=plugin).boost(model, optimizer, nn.CrossEntropyLoss(), loader)
    chosen = plugin.batch_balancer.allocation.shares
    loader.divide_by(lambda samples: sizes_by_rank(division, samples))
    steps = 0
    for images, labels in loader:
        loss = cross_entropy(model(images).float(), labels)
        optimizer.backward(loss)
        if clip:
            optimizer.clip_grad_by_norm(clip)
            if loader.current.is_last and plugin.precision == "fp16":
                with pytest.raises(RuntimeError, match="is multiplied by the loss scale"):
                    nn.utils.clip_grad_value_(model.parameters(), clip)
        optimizer.step()
        steps += loader.current.is_last
        optimizer.zero_grad()
    assert steps == STEPS
    model.eval()
    with torch.no_grad():
        logits = model(Images().images).float()
    return {"logits": logits, "samples": [share.samples for share in chosen], "ticks": plugin.balancer._iteration}


def train_alone(max_norm: float = 0.0) -> Tensor:
    model = tiny_vit()
    return train_on_whole_batches(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), max_norm)


def train_on_whole_batches(model: nn.Module, optimizer: Any, max_norm: float = 0.0) -> Tensor:
    """Returns the logits of all samples after training."""
    fit(model, optimizer, global_batches(Images(), GLOBAL_BATCH), max_norm=max_norm)
    model.eval()
    with torch.no_grad():
        return model(Images().images)


@unmeasured
def train_each(runs: list[Any], tp_size: int) -> list[dict[str, Any]]:
    """Call :func:`train` with each of these divisions, options, and norms to clip to."""
    return [train(division, tp_size, options, *norm) for division, options, *norm in runs]


@pytest.mark.parametrize(
    ("tp_size", "cases"),
    [
        (1, [([[5], [2]], "off"), ([[0, 0], [4, 3]], "off")]),
        (1, [([[2, 1], [1, 1], [1, 1]], "off")]),
        (2, [([[4, 2], [1, 0]], "off"), ([[1], [6]], "auto")]),
    ],
)
def test_training_equals_that_of_one_process(tp_size: int, cases: list[tuple[list[list[int]], Any]]) -> None:
    runs: list[Any] = [
        (division, {"precision": "fp32", "balance": BalanceConfig(mode=mode)}) for division, mode in cases
    ]
    expected = train_alone()
    for results in run_ranks(tp_size * len(cases[0][0]), train_each, runs, tp_size):
        for run, result in zip(runs, results, strict=True):
            torch.testing.assert_close(
                result["logits"], expected, rtol=1e-3, atol=1e-4, msg=lambda text, run=run: f"{run}: {text}"
            )
            assert sum(result["samples"]) == GLOBAL_BATCH, run
            # The balancer of layers counts optimizer steps, not micro-batches.
            assert result["ticks"] == STEPS, run


@pytest.mark.parametrize("tp_size", [1, 2] if IS_THOROUGH else [2])
def test_zero_in_half_precision_is_close_to_training_in_fp32(tp_size: int) -> None:
    division = [[3, 1], [2, 1]]
    runs: list[Any] = [(division, {"precision": "bf16", "zero_stage": zero_stage}) for zero_stage in (1, 2)]
    results = run_ranks(2 * tp_size, train_each, runs, tp_size)
    for of_rank in results:
        for result, first in zip(of_rank, results[0], strict=True):
            torch.testing.assert_close(result["logits"], train_alone(), rtol=0.1, atol=0.1)
            assert torch.equal(result["logits"], first["logits"])


def train_with_colossalai(tp_size: int, max_norm: float) -> Tensor:
    """Train one replica with Colossal-AI's own plugin. Returns the logits of all samples."""
    model = tiny_vit()
    plugin = HybridParallelPlugin(tp_size, 1, precision="fp32", max_norm=max_norm, custom_policy=hetero_policy(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)
    return train_on_whole_batches(model, optimizer)


@pytest.mark.parametrize("tp_size", [1, 2] if IS_THOROUGH else [2])
def test_clipping_equals_that_of_one_replica(tp_size: int) -> None:
    expected = run_ranks(tp_size, train_with_colossalai, tp_size, 0.5)[0]
    torch.testing.assert_close(expected, train_alone(0.5), rtol=1e-3, atol=1e-4)
    division = [[4, 1], [1, 1]]
    runs: list[Any] = [
        (division, {"precision": "fp32", "max_norm": 0.5}),
        (division, {"precision": "fp32"}, 0.5),
        (division, {"precision": "fp16", "initial_scale": 2**6}, 0.5),
    ]
    for results in run_ranks(2 * tp_size, train_each, runs, tp_size):
        for result, tolerance in zip(results, (1e-3, 1e-3, 0.1), strict=True):
            torch.testing.assert_close(result["logits"], expected, rtol=tolerance, atol=tolerance / 10)


def check_refused(cases: list[tuple[dict[str, Any], dict[str, Any], str]]) -> None:
    for options, batches, words in cases:
        with pytest.raises(ValueError, match=words):
            HeteroHybridParallelPlugin(batches=BatchConfig(**batches), precision="bf16", **options)
    with pytest.raises(TypeError, match="is not a BatchConfig"):
        HeteroHybridParallelPlugin(1, 1, batches=8, precision="bf16")  # type: ignore[arg-type]


SEQUENCES = dict(enable_sequence_parallelism=True, sp_size=2)


def test_options_that_cannot_be_combined_are_refused() -> None:
    cases: list[Any] = [
        (
            {"tp_size": 1, "pp_size": 2, "num_microbatches": 2},
            {"global_batch_size": 4},
            r"cannot be combined with a pipeline \(pp_size=2\): a plan gives each",
        ),
        (
            {"tp_size": 1, "pp_size": 1, "zero_stage": 2},
            {"global_batch_size": 4, "accumulation": "per_rank"},
            'accumulation="per_rank" needs zero_stage 0 or 1, not 2',
        ),
        # Colossal-AI's default mode of sequence parallelism is all_to_all.
        ({"tp_size": 1, "pp_size": 1, **SEQUENCES}, {"global_batch_size": 4}, "cannot be combined with sp_size=2"),
        (
            {"tp_size": 1, "pp_size": 1, "sequence_parallelism_mode": "ring_attn", **SEQUENCES},
            {"global_batch_size": 4},
            "cannot be combined with sp_size=2",
        ),
    ]
    run_ranks(2, check_refused, cases)
