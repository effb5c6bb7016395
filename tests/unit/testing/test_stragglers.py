"""Injected stragglers: which ranks a schedule slows and when, how products are slowed, and repeated passes."""

from collections import Counter
from typing import Any

import pytest
import torch

from colossal_hetero.layers import linear
from colossal_hetero.testing import Stragglers, inject_stragglers
from colossal_hetero.testing import stragglers as module
from colossal_hetero.testing.stragglers import quota_and_period, repeat_passes


def table(stragglers: Stragglers, periods: int) -> list[list[float]]:
    return [[stragglers.slowdown(rank, p) for rank in range(stragglers.world_size)] for p in range(periods)]


def test_round_robin_moves_every_slowdown_to_the_next_rank() -> None:
    stragglers = Stragglers(slowdowns={1: 4.0, 2: 2.0}, schedule="round-robin", world_size=3)
    assert table(stragglers, 4) == [[1.0, 4.0, 2.0], [2.0, 1.0, 4.0], [4.0, 2.0, 1.0], [1.0, 4.0, 2.0]]


def test_random_draws_new_ranks_in_every_period() -> None:
    def drawn(seed: int) -> list[list[float]]:
        return table(Stragglers(slowdowns={0: 4.0, 3: 2.0}, schedule="random", world_size=4, seed=seed), 60)

    assert all(sorted(slowdowns) == [1.0, 1.0, 2.0, 4.0] for slowdowns in drawn(0))
    assert drawn(0) == drawn(0) != drawn(1), "ranks would disagree about which rank is slow"
    places = Counter(slowdowns.index(4.0) for slowdowns in drawn(0))
    assert set(places) == {0, 1, 2, 3} and max(places.values()) < 30


@pytest.mark.parametrize("slowdown, products", [(1.0, 100), (4.0, 400), (1.25, 125), (2.5, 250), (1.01, 101)])
def test_repeating_computes_a_product_factor_times_on_average(slowdown: float, products: int) -> None:
    slow_down, runs = module._RepeatSlowdown(), list[int]()
    slow_down.factor = slowdown
    for number in range(100):
        before = len(runs)
        assert slow_down(lambda number=number: torch.tensor((runs.append(number), float(number))[1])) == number
        assert int(slowdown) <= len(runs) - before <= int(slowdown) + 1, "repetitions are not spread evenly"
    assert len(runs) == pytest.approx(products, abs=1)


class Optimizer:
    steps = 0

    def step(self, closure: Any = None) -> str:
        self.steps += 1
        return "stepped"


ROUND_ROBIN = dict(schedule="round-robin", period="iteration")


@pytest.mark.parametrize(
    ("rank", "per_epoch", "options", "expected"),
    [
        (0, None, ROUND_ROBIN, [3.0, 1.0, 3.0, 1.0, 3.0]),
        (1, None, ROUND_ROBIN, [1.0, 3.0, 1.0, 3.0, 1.0]),
        (0, 3, dict(schedule="round-robin"), [3.0, 3.0, 3.0, 1.0, 1.0, 1.0, 3.0]),
        # If the schedule changes every iteration, the length of an epoch makes no difference.
        (0, 3, ROUND_ROBIN, [3.0, 1.0, 3.0, 1.0]),
        (0, None, {}, [3.0, 3.0, 3.0]),
        (1, None, {}, [1.0, 1.0, 1.0]),
    ],
)
def test_injection_follows_the_schedule_by_iteration_and_by_epoch(monkeypatch, rank, per_epoch, options, expected):
    layer, optimizer, seen = type("Layer", (), {"slow_down": None})(), Optimizer(), []
    monkeypatch.setattr(linear, "hetero_layers", lambda model: {"layer": layer})
    monkeypatch.setattr(module.dist, "get_rank", lambda: rank)
    stragglers = Stragglers(slowdowns={0: 3.0}, world_size=2, **options)
    inject_stragglers(torch.nn.Linear(1, 1), optimizer, stragglers, per_epoch)
    for _ in expected:
        seen.append(layer.slow_down.factor)
        assert optimizer.step() == "stepped"
    assert seen == expected and optimizer.steps == len(expected)


class Counted(torch.autograd.Function):
    """Returns its input and records each forward and backward pass."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, passes: list[str]) -> torch.Tensor:
        ctx.passes = passes
        passes.append("forward")
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.passes.append("backward")
        return gradient, None


def test_repeated_passes_change_only_the_time() -> None:
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    passes: list[str] = []
    counter = torch.nn.Module()
    counter.__class__ = type("Counter", (torch.nn.Module,), {"forward": lambda _, value: Counted.apply(value, passes)})
    models[1].append(counter)
    names = [name for name, _ in models[1].named_parameters()]
    repeat_passes(models[1], 5)
    assert [name for name, _ in models[1].named_parameters()] == names
    inputs = torch.randn(4, 5)
    for model in models:
        for _ in range(2):
            model(inputs).square().mean().backward()
    assert passes.count("forward") == passes.count("backward") == 10
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    passes.clear()
    models[1].eval()
    models[1](inputs)
    with torch.no_grad():
        models[1].train()(inputs)
    assert passes == ["forward"] * 2


def test_a_quota_is_at_least_a_millisecond_long() -> None:
    assert quota_and_period(0.5, 100_000) == (50_000, 100_000) and quota_and_period(1.5, 1_000) == (1_500, 1_000)
    assert quota_and_period(0.425 / 4, 8_000) == (1_000, 9_412)
    assert quota_and_period(0.001, 1_000) == (1_000, 1_000_000)
    for share, period, words in ((0.0009, 1_000, "share=0.0009 is too little"), (0.5, 999, "period_us=999 must be")):
        with pytest.raises(ValueError, match=words):
            quota_and_period(share, period)
