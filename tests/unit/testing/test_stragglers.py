"""Injected stragglers: which ranks a schedule slows and when, and how products are slowed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from colossal_hetero.layers import linear
from colossal_hetero.testing import stragglers as module
from colossal_hetero.testing.stragglers import Stragglers, inject_stragglers

# Validation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_refuses_ranks_that_do_not_exist(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} does not exist; there are 2 ranks, 0 to 1"):
        Stragglers(slowdowns={rank: 2.0}, world_size=2)


@pytest.mark.parametrize("slowdown", [0.5, 0.0, -2.0, float("nan"), float("inf")])
def test_refuses_impossible_slowdowns(slowdown: float) -> None:
    with pytest.raises(ValueError, match=f"slowdown {slowdown} of rank 0 must be a number of at least 1"):
        Stragglers(slowdowns={0: slowdown}, world_size=2)


@pytest.mark.parametrize(
    "name, valid",
    [("schedule", "constant, round-robin, random"), ("period", "iteration, epoch"), ("means", "repeat, sleep")],
)
def test_refuses_unknown_kinds(name: str, valid: str) -> None:
    with pytest.raises(ValueError, match=f"unknown {name} 'often'; valid are {valid}"):
        Stragglers(slowdowns={0: 2.0}, world_size=2, **{name: "often"})


# Schedules -------------------------------------------------------------------------------------------------------


def table(stragglers: Stragglers, periods: int) -> list[list[float]]:
    """The slowdown χ by period and rank."""
    return [[stragglers.slowdown(rank, p) for rank in range(stragglers.world_size)] for p in range(periods)]


def test_constant() -> None:
    assert table(Stragglers(slowdowns={1: 4.0}, world_size=3), 3) == [[1.0, 4.0, 1.0]] * 3


def test_round_robin_moves_every_slowdown_to_the_next_rank() -> None:
    stragglers = Stragglers(slowdowns={1: 4.0, 2: 2.0}, schedule="round-robin", world_size=3)
    assert table(stragglers, 4) == [[1.0, 4.0, 2.0], [2.0, 1.0, 4.0], [4.0, 2.0, 1.0], [1.0, 4.0, 2.0]]


def test_random_draws_new_ranks_in_every_period() -> None:
    def drawn(seed: int) -> list[list[float]]:
        return table(Stragglers(slowdowns={0: 4.0, 3: 2.0}, schedule="random", world_size=4, seed=seed), 60)

    for slowdowns in drawn(0):
        assert sorted(slowdowns) == [1.0, 1.0, 2.0, 4.0]
    assert drawn(0) == drawn(0), "ranks would disagree about which rank is slow"
    assert drawn(0) != drawn(1)
    places = Counter(slowdowns.index(4.0) for slowdowns in drawn(0))
    assert set(places) == {0, 1, 2, 3} and max(places.values()) < 30


# Slowdowns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slowdown, products", [(1.0, 100), (4.0, 400), (1.25, 125), (2.5, 250), (1.01, 101)])
def test_repeating_computes_a_product_factor_times_on_average(slowdown: float, products: int) -> None:
    slow_down, runs = module._RepeatSlowdown(), []
    slow_down.factor = slowdown
    for number in range(100):
        before = len(runs)

        def product(number: int = number) -> torch.Tensor:
            runs.append(number)
            return torch.tensor(float(number))

        assert slow_down(product) == number
        assert int(slowdown) <= len(runs) - before <= int(slowdown) + 1, "repetitions are not spread evenly"
        if number % 10 == 0:
            slow_down.begin_iteration()
    assert len(runs) == pytest.approx(products, abs=1)


def test_repeating_returns_the_first_result() -> None:
    slow_down = module._RepeatSlowdown()
    slow_down.factor = 3.0
    results = [torch.randn(2) for _ in range(3)]
    remaining = iter(results)
    assert slow_down(lambda: next(remaining)) is results[0]


@pytest.mark.parametrize("slowdown", [1.0, 1.5, 8.0])
def test_the_sleep_is_proportional_to_the_time_of_the_product(slowdown: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 100.0, []
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    monkeypatch.setattr(module.time, "sleep", slept.append)
    slow_down = module._SleepSlowdown()
    slow_down.factor = slowdown

    def product() -> torch.Tensor:
        nonlocal now
        now += 0.25
        return torch.ones(1)

    assert torch.equal(slow_down(product), torch.ones(1))
    assert slept == [pytest.approx((slowdown - 1) * 0.25)]


# Injection -------------------------------------------------------------------------------------------------------


class Optimizer:
    def __init__(self) -> None:
        self.steps = 0

    def step(self, closure: Any = None) -> str:
        self.steps += 1
        return "stepped"


def slowdowns_by_iteration(
    monkeypatch: pytest.MonkeyPatch, rank: int, iterations: int, per_epoch: int | None = None, **options: Any
) -> list[float]:
    """The slowdown χ of a model's only layer on ``rank`` before each step of the optimizer."""

    class Layer:
        slow_down: Any = None

    layer, optimizer = Layer(), Optimizer()
    monkeypatch.setattr(linear, "hetero_layers", lambda model: {"layer": layer})
    monkeypatch.setattr(module.dist, "get_rank", lambda: rank)
    stragglers = Stragglers(slowdowns={0: 3.0}, world_size=2, **options)
    inject_stragglers(torch.nn.Linear(1, 1), optimizer, stragglers, per_epoch)
    seen = []
    for _ in range(iterations):
        seen.append(layer.slow_down.factor)
        assert optimizer.step() == "stepped"
    assert optimizer.steps == iterations
    return seen


@pytest.mark.parametrize("means", ["repeat", "sleep"])
def test_injection_follows_the_schedule_by_iteration_and_by_epoch(means: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_iteration = dict(schedule="round-robin", period="iteration", means=means)
    assert slowdowns_by_iteration(monkeypatch, 0, 5, **by_iteration) == [3.0, 1.0, 3.0, 1.0, 3.0]
    assert slowdowns_by_iteration(monkeypatch, 1, 5, **by_iteration) == [1.0, 3.0, 1.0, 3.0, 1.0]
    by_epoch = dict(schedule="round-robin", means=means)
    assert slowdowns_by_iteration(monkeypatch, 0, 7, 3, **by_epoch) == [3.0, 3.0, 3.0, 1.0, 1.0, 1.0, 3.0]
    # If the schedule changes every iteration, the length of an epoch makes no difference.
    assert slowdowns_by_iteration(monkeypatch, 0, 4, 3, **by_iteration) == [3.0, 1.0, 3.0, 1.0]
    assert slowdowns_by_iteration(monkeypatch, 0, 3, means=means) == [3.0, 3.0, 3.0]
    assert slowdowns_by_iteration(monkeypatch, 1, 3, means=means) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["round-robin", "random"])
def test_a_schedule_that_changes_every_epoch_needs_the_length_of_an_epoch(schedule: str) -> None:
    stragglers = Stragglers(slowdowns={0: 3.0}, schedule=schedule, world_size=2)
    with pytest.raises(ValueError, match=f"a {schedule} schedule that changes every epoch needs iterations_per_epoch"):
        inject_stragglers(torch.nn.Linear(1, 1), Optimizer(), stragglers)


def test_a_model_without_parallel_layers_cannot_be_slowed() -> None:
    stragglers = Stragglers(slowdowns={0: 3.0}, world_size=2)
    with pytest.raises(ValueError, match="has no tensor-parallel layers of colossal_hetero"):
        inject_stragglers(torch.nn.Linear(1, 1), Optimizer(), stragglers)
