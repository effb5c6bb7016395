"""Injected stragglers: which ranks a schedule slows and when, and how products are slowed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from colossal_hetero.layers import linear
from colossal_hetero.testing import stragglers as module
from colossal_hetero.testing.stragglers import Stragglers, inject_stragglers

IMPOSSIBLE = (0.5, -2.0, float("nan"), float("inf"))


def table(stragglers: Stragglers, periods: int) -> list[list[float]]:
    """The slowdown χ by period and rank."""
    return [[stragglers.slowdown(rank, p) for rank in range(stragglers.world_size)] for p in range(periods)]


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(slowdowns={2: 2.0}), "rank 2 does not exist; there are 2 ranks, 0 to 1"),
        (dict(slowdowns={-1: 2.0}), "rank -1 does not exist"),
        *(
            (dict(slowdowns={0: each}), f"slowdown {each} of rank 0 must be a number of at least 1")
            for each in IMPOSSIBLE
        ),
        (dict(schedule="often"), "unknown schedule 'often'; valid are constant, round-robin, random"),
        (dict(period="often"), "unknown period 'often'; valid are iteration, epoch"),
        (dict(means="often"), "unknown means 'often'; valid are repeat, sleep"),
        (dict(schedule="random"), "a random schedule that changes every epoch needs iterations_per_epoch"),
        (dict(), "has no tensor-parallel layers of colossal_hetero"),
    ],
)
def test_what_cannot_be_slowed_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stragglers = Stragglers(**{"slowdowns": {0: 3.0}, "world_size": 2, **options})
        inject_stragglers(torch.nn.Linear(1, 1), Optimizer(), stragglers)
