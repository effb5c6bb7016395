"""Training runs in which a straggler migrates work, for tests of migration through the plugin.

An injected straggler is slow from the first iteration on. The balancer detects it, and its plan applies from the third
iteration on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor, nn

from colossal_hetero import BalanceConfig
from colossal_hetero.balance.plan import BalancePlan
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import SlowdownScript, Trained, boost, ours, scripted, sgd, theirs

METHODS = ("block", "broadcast-reduce", "scatter-gather")
ITERATIONS = 4
IN_FORCE = 2
"""The first iteration in which the plan applies."""


def methods_for(case: int) -> tuple[str, ...]:
    """The methods that a case is checked with: block form, and one of the two column forms in turn.

    The column forms differ only in the messages that they send. ``make test-thorough`` checks each case with all.
    """
    return METHODS if IS_THOROUGH else ("block", METHODS[1 + case % 2])


def migrate(method: str, **choices: Any) -> BalanceConfig:
    choices = dict(mode="migrate", warmup_iterations=0, patience=1, measure_costs=False) | choices
    return BalanceConfig(migration=method, **choices)  # type: ignore[arg-type]


def slow(*ranks: int) -> SlowdownScript:
    """The products of these global ranks take four times as long. With two ranks, 0.6 of the work of one migrates."""
    return lambda rank, iteration: 4.0 if rank in ranks else 1.0


def migrating_run(method: str, slowdown: SlowdownScript, model: nn.Module | None = None, **options: Any) -> Trained:
    """A model boosted by our plugin, whose ranks seem to be as slow as ``slowdown`` says.

    Args:
        model: None: a tiny vision transformer.
        options: of the plugin.
    """
    with scripted(slowdown):
        return boost(ours(migrate(method), **options), model, sgd)


def seeded_migrating_run(make: Callable[[], nn.Module], slowdown: SlowdownScript) -> Trained:
    """Like :func:`migrating_run` in block form, with all ranks in one tensor-parallel group. All runs on a rank draw
    the same random numbers in training."""
    Randomizer._INDEX = 0
    model = make()
    torch.manual_seed(11)
    return migrating_run("block", slowdown, model, tp_size=dist.get_world_size())


def reference_run(model: nn.Module | None = None, **options: Any) -> Trained:
    """The same model and options with Colossal-AI's own plugin."""
    return boost(theirs(**options), model, sgd)


@dataclass
class Watch:
    """Records what the balancer of this rank does in each iteration; pass it to ``train`` as ``each``."""

    run: Trained
    plans: list[BalancePlan] = field(default_factory=list)
    """The plan after each iteration."""
    messages: list[int] = field(default_factory=list)
    """The number of messages that this rank sent in each iteration."""
    bytes: list[int] = field(default_factory=list)
    """The bytes of these messages."""

    def __call__(self, iteration: int) -> None:
        balancer = self.run.plugin.balancer
        self.plans.append(balancer.plan)
        self.messages.append(sum(sent.messages for sent in balancer.traffic.sent.values()))
        self.bytes.append(sum(sent.bytes for sent in balancer.traffic.sent.values()))
        balancer.traffic.reset()

    def assert_migrated(self, sender: int, what: str) -> None:
        """From IN_FORCE on rank ``sender`` of the group migrates, the others receive, and this rank sends messages."""
        plan = self.plans[-1]
        ranks = len(plan.migrate)
        assert plan.migrate[sender] > 0.1, f"{what}: {plan}"
        assert all(plan.receive[rank] > 0 for rank in range(ranks) if rank != sender), f"{what}: {plan}"
        assert all(before == plan for before in self.plans[IN_FORCE:]), f"{what}: {self.plans}"
        assert not any(self.messages[:IN_FORCE]), f"{what}: {self.messages}"
        assert all(count > 0 for count in self.messages[IN_FORCE:]), f"{what}: {self.messages}"


def relative_difference(
    actual: dict[str, Tensor], expected: dict[str, Tensor], size_of: dict[str, Tensor] | None = None
) -> float:
    """The largest difference of any tensor, relative to its norm in ``size_of``, by default in ``expected``."""
    assert list(actual) == list(expected)
    sizes = expected if size_of is None else size_of
    return max(
        float((actual[name].float() - expected[name].float()).norm() / sizes[name].float().norm().clamp(min=1e-6))
        for name in expected
    )


def assert_equal(actual: Trained, expected: Trained, what: str) -> None:
    """Assert that losses and parameters differ only as much as another order of summation in fp32 explains."""
    assert actual.losses == pytest.approx(expected.losses, rel=1e-5), what
    assert all(math.isfinite(loss) for loss in expected.losses), what
    difference = relative_difference(actual.parameters, expected.parameters)
    assert difference <= 1e-5, f"{what}: parameters differ by {difference}"
