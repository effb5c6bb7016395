"""A rank is killed in the middle of a step: the others end at once, and say that a connection was lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from colossal_hetero.common.ranks import is_lost_connection
from tests.support.harness import errors_of_the_others
from tests.support.random_examples import IS_THOROUGH
from tests.support.zero_runs import boosted, unmeasured

RANKS = 3
STAGES = (0, 1, 3)


def kill_this_rank(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@unmeasured
def train_until_killed(stage: int, victim: int, place: str) -> None:
    """Train; in its second global batch the rank ``victim`` ends in ``place``."""
    _, _, model, optimizer, criterion, loader, _ = boosted(stage)
    is_victim = torch.distributed.get_rank() == victim
    steps = 0
    for inputs, targets in loader:
        due = is_victim and steps == 1
        if due and place == "forward":
            next(each for each in model.modules() if isinstance(each, nn.LayerNorm)).register_forward_hook(
                kill_this_rank
            )
        outputs = model(inputs)
        if due and place == "backward":
            outputs.register_hook(kill_this_rank)
        optimizer.backward(criterion(outputs, targets))
        if due and place == "step":
            kill_this_rank()
        if due and place == "error":
            raise KeyError("no such word")
        optimizer.step()
        steps += loader.current.is_last
        optimizer.zero_grad()


def measure_until_killed(stage: int, victim: int, place: str) -> None:
    """The rank ``victim`` ends while it measures."""
    steps = 0

    def step(model: nn.Module, criterion: Callable, batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if torch.distributed.get_rank() == victim and steps == 6:
            kill_this_rank()
        return criterion(model(batch[0]), batch[1])

    boosted(stage, training_step=step)


def assert_lost(run: Callable[..., None], stage: int, victim: int, place: str) -> None:
    for words in errors_of_the_others(RANKS, run, stage, victim, place, victim=victim):
        assert is_lost_connection(words), f"stage {stage}, {place}: {words}"


PLACES = ("forward", "backward", "step")
# Without `thorough`, each place, each rank and each stage once.
KILLED = [(place, victim, stage) for place in PLACES for victim in range(RANKS) for stage in STAGES]


@pytest.mark.parametrize(
    ("place", "victim", "stage"), KILLED if IS_THOROUGH else list(zip(PLACES, (2, 0, 1), STAGES, strict=True))
)
def test_the_others_end_if_a_rank_was_killed(place: str, victim: int, stage: int) -> None:
    assert_lost(train_until_killed, stage, victim, place)


@pytest.mark.parametrize("victim", range(RANKS) if IS_THOROUGH else [1])
def test_the_others_end_if_a_rank_was_killed_while_it_measured(victim: int) -> None:
    assert_lost(measure_until_killed, STAGES[victim], victim, "measuring")


@pytest.mark.parametrize("stage", STAGES if IS_THOROUGH else [3])
def test_no_rank_waits_for_a_rank_that_has_failed(stage: int) -> None:
    errors_of_the_others(2, train_until_killed, stage, 1, "error", victim=1)
