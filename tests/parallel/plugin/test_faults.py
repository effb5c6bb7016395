"""A rank that runs out of memory repeats its forward pass, or ends all ranks with words; if one is killed, all end."""

import ctypes
import os
import resource
import signal
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_hetero import BalanceConfig
from colossal_hetero.common.ranks import is_lost_connection
from colossal_hetero.data_parallel import attach
from tests.support import zero_runs
from tests.support.checks import on
from tests.support.harness import answer, errors_of_the_others, run_ranks, start_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import boost, ours, scripted, train
from tests.support.zero_runs import Numbered, assert_trained, boosted, fit, global_batches, make_model, unmeasured


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


stored_outside = attach.stored_outside


@contextmanager
def noticed(model: nn.Module) -> Any:
    with stored_outside(model):
        Limited.outside = True
        yield
    Limited.outside = False


@unmeasured
def train_on(failing: int, stages: tuple[int, ...] = (0, 1, 2), phase: str = "forward") -> Any:
    trained = []
    with patch.object(attach, "stored_outside", noticed), patch.object(attach, "MIN_BYTES", 1):
        for stage in stages:
            Limited.phase = ""
            model = make_model()
            model.register_forward_hook(lambda _, __, outputs: Limited.apply(outputs))
            run = boosted(stage, model, division=[[3, 2], [1, 2]])
            Limited.phase, Limited.largest = (phase, 1) if dist.get_rank() == failing else ("", 0)
            trained.append(run.fit())
    return trained


@on(2, 0)
@on(2, 1)
def training_goes_on_as_if_there_were_enough_memory(failing: int) -> None:
    model = make_model()
    expected = fit(model, zero_runs.make_optimizer(model, "sgd"), global_batches(Numbered(), 8))
    assert_trained([train_on(failing)], (0, 1, 2), expected)


@pytest.mark.parametrize(("stage", "phase"), [(0, "backward"), (1, "backward"), (3, "forward"), (3, "backward")])
def test_otherwise_all_ranks_end_and_words_say_why(stage: int, phase: str) -> None:
    with start_ranks(2, train_on, 1, (stage,), phase) as ranks:
        for rank, (_, pipe) in enumerate(ranks):
            assert pipe.poll(60), rank
            succeeded, words = answer(pipe)
            assert not succeeded
    assert f"rank 1 ran out of memory in the {phase} pass of a micro-batch of 2 samples" in words
    assert "For the next run, set max_micro_batch=1, or lower max_batch of this rank" in words


class Wide(nn.Module):
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


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # parameters of glibc's ``mallopt``


@unmeasured
def train_with_and_without_a_limit() -> None:
    # Each tensor of 64 kB or more is mapped separately, so that the address space contains only tensors in use.
    mallopt = ctypes.CDLL(None).mallopt
    assert mallopt(M_MMAP_THRESHOLD, 65536) and mallopt(M_TRIM_THRESHOLD, 65536) and mallopt(M_ARENA_MAX, 1)
    expected = train_within(None)
    with patch.object(attach.OutOfMemoryGuard, "_tell") as told:
        actual = train_within(20 << 20)
    assert [call.args for call in told.call_args_list] == [(8,)]
    assert torch.equal(actual, expected)


def test_a_real_limit() -> None:
    run_ranks(1, train_with_and_without_a_limit)


STAGES, RANKS = (0, 1, 3), 3


def kill_this_rank(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@unmeasured
def train_until_killed(stage: int, victim: int, place: str) -> None:
    _, _, model, optimizer, criterion, loader, _ = boosted(stage)
    steps = 0
    for inputs, targets in loader:
        due = place if dist.get_rank() == victim and steps == 1 else ""
        if due == "forward":
            next(each for each in model.modules() if isinstance(each, nn.LayerNorm)).register_forward_hook(
                kill_this_rank
            )
        outputs = model(inputs)
        if due == "backward":
            outputs.register_hook(kill_this_rank)
        optimizer.backward(criterion(outputs, targets))
        if due == "step":
            kill_this_rank()
        if due == "error":
            raise KeyError("no such word")
        optimizer.step()
        steps += loader.current.is_last
        optimizer.zero_grad()


def measure_until_killed(stage: int, victim: int, place: str) -> None:
    steps = 0

    def step(model: nn.Module, criterion: Callable, batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if dist.get_rank() == victim and steps == 6:
            kill_this_rank()
        return criterion(model(batch[0]), batch[1])

    boosted(stage, training_step=step)


PLACES = ("forward", "backward", "step")
# Without `thorough`, each place, each rank and each stage once.
KILLED = [(train_until_killed, *each, place) for place, *each in zip(PLACES, STAGES, (2, 0, 1), strict=True)]
KILLED += [(measure_until_killed, 1, 1, "measuring")]
if IS_THOROUGH:
    KILLED = [(train_until_killed, stage, rank, at) for at in PLACES for rank in range(RANKS) for stage in STAGES]
    KILLED += [(measure_until_killed, STAGES[rank], rank, "measuring") for rank in range(RANKS)]


@pytest.mark.parametrize(("run", "stage", "victim", "place"), KILLED)
def test_the_others_end_if_a_rank_was_killed(run: Callable[..., None], stage: int, victim: int, place: str) -> None:
    for words in errors_of_the_others(RANKS, run, stage, victim, place, victim=victim):
        assert is_lost_connection(words), f"stage {stage}, {place}: {words}"


@pytest.mark.parametrize("stage", STAGES if IS_THOROUGH else [3])
def test_no_rank_waits_for_a_rank_that_has_failed(stage: int) -> None:
    errors_of_the_others(2, train_until_killed, stage, 1, "error", victim=1)


def train_balanced_until_killed(options: dict[str, Any], victim: int, exits: bool) -> None:
    def die(iteration: int) -> None:
        if iteration == 5 and dist.get_rank() == victim:
            os._exit(1) if exits else kill_this_rank()

    with scripted(lambda rank, iteration: 4.0 if rank == victim else 1.0):
        run = boost(ours(BalanceConfig(mode="resize"), tp_size=2, **options))
    train(run, 100, each=die)
    raise AssertionError("training ended without an error although a rank died")


HYBRID: list[Any] = [(2, 1, True, {}), (4, 3, False, dict(pp_size=2, num_microbatches=3))]
HYBRID += [(2, 0, False, {}), (4, 2, False, {})] * IS_THOROUGH


@pytest.mark.parametrize(("world", "victim", "exits", "options"), HYBRID)
def test_a_rank_of_a_balanced_group_or_a_pipeline_ends(world: int, victim: int, exits: bool, options: Any) -> None:
    errors = errors_of_the_others(world, train_balanced_until_killed, options, victim, exits, victim=victim, seconds=90)
    assert all("RuntimeError" in error for error in errors)
