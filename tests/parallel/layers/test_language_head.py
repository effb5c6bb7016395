"""The vocabulary-parallel head of language models is balanced by its columns, or by rows of the vocabulary where
nothing is pruned; the reference is Colossal-AI's plugin.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossal_hetero import BalanceConfig
from colossal_hetero.balance import BalancePlan
from colossal_hetero.layers import HeteroVocabParallelLMHead1D
from tests.support.harness import run_ranks
from tests.support.language_models import MODELS, plan_of, tokens, train_on_tokens
from tests.support.migration_runs import assert_equal
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
        run = boosted(family, model, more, migration="broadcast-reduce" if number % 2 else "block", head=False)
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


def check_rows(steps: int) -> None:
    """Rows of each rank's part of the vocabulary migrate in turn."""
    ranks = dist.get_world_size()
    families = (("gpt2", {}), ("gpt2", dict(tie_word_embeddings=False)), ("llama", {}))
    for number, (family, model) in enumerate(families if ranks == 2 else families[:1]):
        expected = train_on_tokens(reference(family, model, {}), ranks * steps)
        run = boosted(family, model, {})
        block = head_of(run).block
        for sender in range(ranks):
            run.plugin.balancer.follow(plan_of(sender, ranks))
            if dist.get_rank() == sender:
                assert block.workload.given > 0, block.workload
            train_on_tokens(run, steps)
        assert_equal(run, expected, f"{family}, {model}, case {number}")


@pytest.mark.parametrize(("ranks", "steps"), [(2, 10), (3, 2), (4, 1)])
def test_migrating_rows_of_the_head_is_exact(ranks: int, steps: int) -> None:
    run_ranks(ranks, check_rows, steps)


def check_logits() -> None:
    """Only training passes with labels use the plan; there, logits are not available, on any rank."""
    ranks = dist.get_world_size()
    inputs, labels = tokens(0)
    arguments = dict(input_ids=inputs, attention_mask=torch.ones_like(inputs))
    with_labels = arguments | dict(labels=labels)
    family = "llama" if ranks == 2 else "gpt2"
    expected, run = reference(family, {}, {}), boosted(family, {}, {})
    others = (0.0,) * (ranks - 2)
    run.plugin.balancer.follow(
        BalancePlan(resize=(0.0, 0.0, *others), migrate=(0.5, 0.0, *others), receive=(0.0, 0.5, *others))
    )
    for training, recorded, batch in itertools.product((False, True), (False, True), (arguments, with_labels)):
        if (training and recorded and batch is with_labels) or (family == "gpt2" and batch is arguments):
            continue  # Colossal-AI's GPT-2 needs labels.
        outputs = []
        for each in (run, expected):
            each.model.train(training)
            with torch.set_grad_enabled(recorded):
                outputs.append(each.model(**batch))
        torch.testing.assert_close(outputs[0].logits, outputs[1].logits)
        torch.testing.assert_close(outputs[0].loss, outputs[1].loss)
    output = run.model(**with_labels)
    with pytest.raises(AttributeError, match=r"no 'argmax'.*BalanceConfig\(head=False\)"):
        output.logits.argmax(-1)
    torch.testing.assert_close(output.loss, expected.model(**with_labels).loss)
    if ranks > 2:
        return
    without = boosted("llama", {}, {}, mode="auto", head=False)
    without.plugin.balancer.follow(plan_of(0, 2))
    assert head_of(without).block is None and head_of(without)._migration is None
    torch.testing.assert_close(without.model(**with_labels).logits, expected.model(**with_labels).logits)


@pytest.mark.parametrize("ranks", [2, 3])
def test_logits_are_those_of_colossalai_or_not_available(ranks: int) -> None:
    run_ranks(ranks, check_logits)


def check_auto() -> None:
    """The head is a kind of its own, which can migrate once the model has computed a loss."""
    run = boosted("llama", {}, {}, mode="auto")
    balancer = run.plugin.balancer
    assert math.fsum(kind.weight for kind in balancer.kinds) == pytest.approx(1.0)
    number = head_of(run).kind
    inputs, _ = tokens(0)
    loss = run.model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits.square().mean()
    run.booster.backward(loss, run.optimizer)
    run.optimizer.step()
    assert not balancer._applier.present_kinds()[number].moves
    train_on_tokens(run, 1)
    assert all(kind.moves for kind in balancer._applier.present_kinds())


def test_in_mode_auto_rows_of_the_head_can_migrate() -> None:
    run_ranks(2, check_auto)
