"""Training runs in which a rank gives work away from the first iteration on, for tests of migration."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor, nn
from torch.optim import Optimizer

from colossal_hetero import BalanceConfig
from colossal_hetero.balance.plan import BalancePlan
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import SlowdownScript, Trained, boost, ours, scripted, sgd, theirs, tiny_vit

METHODS = ("block", "broadcast-reduce", "scatter-gather")
ITERATIONS = 2
"""Enough for weights that have changed, momentum, and what is kept from one iteration to the next."""


def methods_for(case: int) -> tuple[str, ...]:
    """The methods that a case is checked with: block form, and one of the two column forms in turn."""
    return METHODS if IS_THOROUGH else ("block", METHODS[1 + case % 2])


def migrate(method: str, **choices: Any) -> BalanceConfig:
    choices = dict(mode="migrate", warmup_iterations=0, patience=1, measure_costs=False) | choices
    return BalanceConfig(migration=method, **choices)  # type: ignore[arg-type]


def slow(*ranks: int) -> SlowdownScript:
    """The products of these global ranks take four times as long. With two ranks, 0.6 of the work of one migrates."""
    return lambda rank, iteration: 4.0 if rank in ranks else 1.0


def small_vit(pp_size: int = 1, **_: Any) -> nn.Module:
    """A vision transformer with a block of each kind in each stage, for these options of the plugin."""
    return tiny_vit(depth=pp_size)


def migrating_run(
    method: str,
    senders: int | Sequence[int],
    model: nn.Module | None = None,
    choices: Any = None,
    make_optimizer: Callable[[nn.Module], Optimizer] = sgd,
    **options: Any,
) -> Trained:
    """A model, by default :func:`small_vit`, boosted by our plugin, in which each of the global ranks ``senders``
    gives work away, see :func:`give`; with ``choices`` of the balancing other than :func:`migrate`'s, ``options`` of
    the plugin."""
    config = migrate(method, **(dict(warmup_iterations=10**6) | (choices or {})))
    with scripted():
        run = boost(ours(config, **options), model or small_vit(**options), make_optimizer)
    give(run.plugin, senders)
    return run


def deciding_run(slowdown: SlowdownScript, method: str = "block", **more: Any) -> Trained:
    """A run whose balancer finds out which rank is slow: a plan applies from the third slow iteration on. ``more`` are
    choices of the balancing."""
    with scripted(slowdown):
        return boost(ours(migrate(method, **more), tp_size=dist.get_world_size()), small_vit(), sgd)


def give(plugin: Any, senders: int | Sequence[int]) -> None:
    """Let each of the global ranks ``senders`` give 0.6 of its work to the others of its group from now on, in unequal
    parts."""
    group = dist.get_process_group_ranks(plugin.tp_group)
    for sender in ({senders} if isinstance(senders, int) else {*senders}) & {*group}:
        given = tuple(0.6 * (rank == sender) for rank in group)
        parts = [0.0 if rank == sender else 1.0 + place for place, rank in enumerate(group)]
        receive = tuple(0.6 * part / sum(parts) for part in parts)
        plugin.balancer.follow(BalancePlan((0.0,) * len(group), given, receive))


def seeded_migrating_run(make: Callable[[], nn.Module], senders: int | Sequence[int]) -> Trained:
    """Like :func:`migrating_run` in block form, with all ranks in one tensor-parallel group. All runs on a rank draw
    the same random numbers in training."""
    Randomizer._INDEX = 0
    model = make()
    torch.manual_seed(11)
    return migrating_run("block", senders, model, tp_size=dist.get_world_size())


def draw_by_unit(run: Trained) -> Trained:
    """Let dropout be drawn by unit from now on, as after any plan. Each rank computes its own units."""
    group = dist.get_process_group_ranks(run.plugin.tp_group)
    give(run.plugin, group[0])
    run.plugin.balancer.follow(BalancePlan.idle(len(group)))
    return run


def reference_run(model: nn.Module | None = None, **options: Any) -> Trained:
    """The same model and options with Colossal-AI's own plugin."""
    return boost(theirs(**options), model or small_vit(**options), sgd)


@dataclass
class Watch:
    """Records what the balancer of this rank does in each iteration; pass it to ``train`` as ``each``."""

    run: Trained
    plans: list[BalancePlan] = field(default_factory=list)
    """The plan after each iteration."""
    messages: list[int] = field(default_factory=list)
    """The number of messages that this rank sent in each iteration."""

    def __call__(self, iteration: int) -> None:
        balancer = self.run.plugin.balancer
        self.plans.append(balancer.plan)
        self.messages.append(sum(sent.messages for sent in balancer.traffic.sent.values()))
        balancer.traffic.reset()

    def assert_migrated(self, sender: int, what: str) -> None:
        """Rank ``sender`` of the group migrates in each iteration, the others receive, and this rank sends messages."""
        plan = self.plans[-1]
        assert plan.migrate[sender] > 0.1, f"{what}: {plan}"
        assert all(share > 0 for rank, share in enumerate(plan.receive) if rank != sender), f"{what}: {plan}"
        assert all(before == plan for before in self.plans), f"{what}: {self.plans}"
        assert all(count > 0 for count in self.messages), f"{what}: {self.messages}"


def relative_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any tensor, relative to its norm in ``expected``."""
    assert list(actual) == list(expected)
    return max(
        float((actual[name].float() - value.float()).norm() / value.float().norm().clamp(min=1e-6))
        for name, value in expected.items()
    )


def assert_equal(actual: Trained, expected: Trained, what: str) -> None:
    """Assert that losses and parameters differ only as much as another order of summation in fp32 explains."""
    assert actual.losses == pytest.approx(expected.losses, rel=1e-5), what
    assert all(math.isfinite(loss) for loss in expected.losses), what
    difference = relative_difference(actual.parameters, expected.parameters)
    assert difference <= 1e-5, f"{what}: parameters differ by {difference}"
