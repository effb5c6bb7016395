"""HeteroZeroPlugin beside training itself: measuring, profiles, new divisions, the choice of a stage, errors."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from colossalai.booster.plugin.torch_fsdp_plugin import TorchFSDPModel
from torch import nn

from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.zero_runs import boosted, flat, make_model, unmeasured


def measure_and_look() -> None:
    for stage in (0, 1, 2, 3):
        model, numbers = make_model(), []
        before = flat(model)
        for boosts in (False, True):
            random.seed(1), np.random.seed(1), torch.manual_seed(1)
            if boosts:
                run = boosted(stage, model, "adamw", loader=dict(shuffle=True))
            numbers.append([random.random(), float(np.random.rand()), float(torch.rand(()))])
        assert numbers[0] == numbers[1] and not run.optimizer.optim.state, stage
        assert all(value.grad is None for value in run.model.parameters()), stage
        assert torch.equal(flat(run.model)[: len(before)], before), stage


def test_measuring_leaves_no_trace() -> None:
    run_ranks(2, measure_and_look)


def fail_on(rank: int) -> None:
    def training_step(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
        if torch.distributed.get_rank() == rank:
            raise KeyError("no such column")
        return criterion(model(batch[0]), batch[1])

    boosted(1, training_step=training_step)


@pytest.mark.parametrize("rank", [0, 1, 2] if IS_THOROUGH else [2])
def test_if_a_rank_fails_while_measuring_all_ranks_raise_its_error(rank: int) -> None:
    with pytest.raises(RuntimeError, match=f"rank {rank}: KeyError: 'no such column'"):
        run_ranks(3, fail_on, rank, timeout_seconds=60)


class Wide(nn.Module):
    """A model with 64 MiB of parameters in layers of 4 MiB, so that sharding saves much memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, 1024)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(16))
        self.last = nn.Linear(1024, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.first(inputs)
        for layer in self.layers:
            outputs = torch.relu(layer(outputs))
        return self.last(outputs)


def train_within(more_mib: list[int], stage: int | str) -> None:
    """Train while each rank may use ``more_mib[rank]`` MiB more address space than before the model is made."""
    rank = torch.distributed.get_rank()
    warm = nn.Linear(1024, 1024)
    warm(torch.randn(64, 1024)).sum().backward()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more_mib[rank] * 2**20, resource.RLIM_INFINITY))
    boosted(stage, Wide(), "adamw", max_micro_batch=4).fit()


@unmeasured
def train_above_each(cases: list[tuple[int, int | str, str]]) -> list[tuple[int, torch.Tensor]]:
    return [train_above(*case) for case in cases]


def train_above(highest: int, stage: int | str, precision: str) -> tuple[int, torch.Tensor]:
    """Train while the second rank reports a lack of memory at all stages up to ``highest``."""

    def training_step(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
        loss = criterion(model(batch[0]), batch[1])
        if torch.distributed.get_rank() == 1 and stage_of(model) <= highest:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return loss

    run = boosted(stage, None, "adamw", division=[[7], [1]], precision=precision, training_step=training_step)
    trained = run.fit()
    assert isinstance(run.plugin.stage, int)
    return run.plugin.stage, trained


def at_each_stage(function: Callable[[int], Any]) -> list[Any]:
    return [function(stage) for stage in (0, 1, 2, 3)]


def stage_of(model: nn.Module) -> int:
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        return 0
    return 3 if isinstance(model, TorchFSDPModel) else 1


def test_auto_chooses_the_first_stage_that_fits_on_all_ranks() -> None:
    # `stage_of` cannot distinguish stages 1 and 2, so either both fail or neither does.
    expected = {-1: 0, 0: 1, 1: 3}
    settings = [(-1, "bf16"), (0, "fp32"), (1, "bf16"), (1, "fp32")]
    chosen: list[tuple[int, int | str, str]] = [(highest, "auto", precision) for highest, precision in settings]
    given: list[tuple[int, int | str, str]] = [(-1, expected[highest], precision) for highest, precision in settings]
    for results in run_ranks(2, train_above_each, chosen + given):
        by_auto, by_number = results[: len(settings)], results[len(settings) :]
        for (highest, precision), (stage, parameters), (_, wanted) in zip(settings, by_auto, by_number, strict=True):
            what = f"no memory up to stage {highest}, {precision}"
            assert stage == expected[highest], what
            # The stages that were tried before have no effect on training.
            assert torch.equal(parameters, wanted), what


def test_a_model_that_does_not_fit_is_reported_on_all_ranks() -> None:
    with pytest.raises(
        RuntimeError, match=r"rank 1 \(cpu.*not enough memory for one sample at any of the stages 0, 1, 2, 3"
    ):
        run_ranks(2, train_within, [2000, 80], "auto", timeout_seconds=60)
    with pytest.raises(RuntimeError, match=r'rank 0 \(cpu.*at stage 1; try stage="auto"'):
        run_ranks(2, train_within, [150, 2000], 1, timeout_seconds=60)
