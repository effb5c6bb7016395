"""A rank that runs out of memory in training repeats its forward pass, or ends all ranks with words that name it."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from torch import nn

from colossal_hetero.data_parallel import out_of_memory
from tests.support.harness import answer, run_ranks, start_ranks
from tests.support.limited import map_large_tensors
from tests.support.zero_runs import (
    Numbered,
    assert_trained,
    boosted,
    fit,
    global_batches,
    make_model,
    make_optimizer,
    unmeasured,
)

DIVISION = [[3, 2], [1, 2]]


class Limited(torch.autograd.Function):
    """The identity function, which runs out of memory in ``phase`` if the batch is larger than ``largest``."""

    phase, largest, outside = "", 0, False

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        Limited.check("forward", inputs)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Limited.check("backward", gradient)
        return gradient

    @staticmethod
    def check(phase: str, values: torch.Tensor) -> None:
        if phase == Limited.phase and len(values) > Limited.largest and not Limited.outside:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")


class LimitedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Limited.apply(self.net(inputs))


stored_outside = out_of_memory.stored_outside


@contextmanager
def noticed(model: nn.Module) -> Any:
    """The real block, which the simulated limit notices."""
    with stored_outside(model):
        Limited.outside = True
        yield
    Limited.outside = False


@unmeasured
def train_on(failing: int, stages: tuple[int, ...] = (0, 1, 2), phase: str = "forward") -> Any:
    trained = []
    with patch.object(out_of_memory, "stored_outside", noticed), patch.object(out_of_memory, "MIN_BYTES", 1):
        for stage in stages:
            Limited.phase = ""
            run = boosted(stage, LimitedNet(), division=DIVISION)
            Limited.phase, Limited.largest = (phase, 1) if torch.distributed.get_rank() == failing else ("", 0)
            trained.append(run.fit())
    return trained


@pytest.mark.parametrize("failing", [0, 1])
def test_training_goes_on_as_if_there_were_enough_memory(failing: int) -> None:
    model = make_model()
    expected = fit(model, make_optimizer(model, "sgd"), global_batches(Numbered(), 8))
    assert_trained(run_ranks(2, train_on, failing), (0, 1, 2), expected)


@pytest.mark.parametrize(("stage", "phase"), [(0, "backward"), (1, "backward"), (3, "forward"), (3, "backward")])
def test_otherwise_all_ranks_end_and_words_say_why(stage: int, phase: str) -> None:
    with start_ranks(2, train_on, 1, (stage,), phase) as ranks:
        for rank, (_, pipe) in enumerate(ranks):
            assert pipe.poll(60), rank
            succeeded, words = answer(pipe)
            assert not succeeded
            if rank == 1:
                assert f"rank 1 ran out of memory in the {phase} pass of a micro-batch of 2 samples" in words
                assert "For the next run, set max_micro_batch=1, or lower max_batch of this rank" in words


class Wide(nn.Module):
    """Activations of 4 MB per sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).unsqueeze(1).expand(-1, 4096, -1)
        for _ in range(16):
            hidden = torch.tanh(hidden)
        return self.last(hidden.mean(1))


def train_within(room: int | None) -> torch.Tensor:
    run = boosted(0, Wide(), max_micro_batch=1, loader=dict(drop_last=True), division=[[8]])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if room is not None:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + room, limits[1]))
    try:
        return run.fit()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@unmeasured
def train_with_and_without_a_limit() -> bool:
    """Whether both give the same parameters. Asserts that the limit was reached."""
    map_large_tensors()
    expected, told = train_within(None), []
    with patch.object(out_of_memory.OutOfMemoryGuard, "_tell", lambda guard, samples: told.append(samples)):
        actual = train_within(20 << 20)
    assert told == [8]
    return torch.equal(actual, expected)


def test_a_real_limit() -> None:
    """A micro-batch of 8 samples needs 34 MB of activations, of which 20 MB can be mapped."""
    assert run_ranks(1, train_with_and_without_a_limit) == [True]
