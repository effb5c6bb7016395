"""The vocabulary-parallel head of language models is balanced by its columns; the reference is Colossal-AI's plugin."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossal_hetero import BalanceConfig
from colossal_hetero.balance import BalancePlan
from colossal_hetero.layers import HeteroVocabParallelLMHead1D
from tests.parallel.layers.migration_runs import assert_equal
from tests.support.harness import run_ranks
from tests.support.language_models import MODELS, plan_of, train_on_tokens
from tests.support.training import Trained, assert_same_parameters, boost, ours, sgd, theirs

CASES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("gpt2", {}, {}),
    ("gpt2", dict(tie_word_embeddings=False), {}),
    ("llama", {}, dict(parallel_output=False)),
)
"""Family, options of the model (GPT-2's embedding and head are tied by default), options of the plugin."""


def options(more: dict[str, Any]) -> dict[str, Any]:
    return dict(tp_size=dist.get_world_size(), make_vocab_size_divisible_by=4) | more


def boosted(family: str, model: dict[str, Any], more: dict[str, Any], **choices: Any) -> Trained:
    config = BalanceConfig(**(dict(mode="migrate", warmup_iterations=10**6, measure_costs=False) | choices))
    return boost(ours(config, **options(more)), MODELS[family](**model), sgd)


def reference(family: str, model: dict[str, Any], more: dict[str, Any]) -> Trained:
    return boost(theirs(custom_policy=None, **options(more)), MODELS[family](**model), sgd)


def head_of(run: Trained) -> HeteroVocabParallelLMHead1D:
    (head,) = (layer for layer in run.model.modules() if isinstance(layer, HeteroVocabParallelLMHead1D))
    return head


def check_migration(steps: int) -> None:
    """Each rank is the straggler in successive iterations: ``steps`` in the first case, at most two in the others."""
    ranks = dist.get_world_size()
    for number, (family, model, more) in enumerate(CASES if ranks == 2 else CASES[:1]):
        steps = min(2, steps) if number else steps
        expected = train_on_tokens(reference(family, model, more), ranks * steps)
        run = boosted(family, model, more, migration="broadcast-reduce" if number % 2 else "block")
        for sender in range(ranks):
            run.plugin.balancer.follow(plan_of(sender, ranks))
            assert head_of(run)._migration is not None
            train_on_tokens(run, steps)
        assert_equal(run, expected, f"{family}, {model}, {more}")


@pytest.mark.parametrize(("ranks", "steps"), [(2, 10), (3, 1), (4, 1)])
def test_migrating_columns_of_the_head_is_exact(ranks: int, steps: int) -> None:
    run_ranks(ranks, check_migration, steps)


def check_idle() -> None:
    for family, model, more in CASES:
        for precision in ("fp32", "bf16"):
            both = more | dict(precision=precision)
            expected = train_on_tokens(reference(family, model, both), 2)
            run = train_on_tokens(boosted(family, model, both), 2)
            assert run.losses == expected.losses, f"{family}, {both}"
            assert_same_parameters(run.parameters, expected.parameters, f"{family}, {both}")


def test_without_a_plan_the_head_is_colossalais_bit_for_bit() -> None:
    run_ranks(2, check_idle)


def check_resizing() -> None:
    """The head of rank 1 sums over half of its columns; the gradients of the other columns are zero."""
    for family, model, more in CASES:
        run = boosted(
            family, dict(tie_word_embeddings=False) | model, more, mode="resize", resizing="column", priority="random"
        )
        run.plugin.balancer.follow(BalancePlan.resizing((0.0, 0.5)))
        before = head_of(run).matrix.clone()
        train_on_tokens(run, 1)
        changed = (head_of(run).matrix != before).any(0)
        assert changed.sum() == (len(changed) // 2 if dist.get_rank() == 1 else len(changed)), f"{family}, {changed}"
        assert torch.isfinite(torch.tensor(train_on_tokens(run, 2).losses)).all()


def test_the_head_is_resized_by_its_columns() -> None:
    run_ranks(2, check_resizing)


def check_auto() -> None:
    """The head stays where it is, is measured, and has no part in the cost of moving everything that can move."""
    run = boosted("gpt2", {}, {}, mode="auto")
    run.plugin.balancer.follow(plan_of(0, 2))
    assert head_of(run)._migration is None and head_of(run).block is None
    assert math.fsum(kind.weight for kind in run.plugin.balancer.kinds) == pytest.approx(1.0)
    expected = train_on_tokens(reference("gpt2", {}, {}), 2)
    assert_equal(train_on_tokens(run, 2), expected, "auto")
    assert head_of(run).passes == 2


def test_in_mode_auto_the_head_stays() -> None:
    run_ranks(2, check_auto)
