"""Blocks are balanced together with sequence parallelism.

The reference is Colossal-AI's own plugin. Colossal-AI 0.5.0 has two errors here: the weight gradients of its mode
``ring`` are wrong (``_ring_as_gather`` returns this rank's own part in place of the last one that it receives), and it
does not sum the gradients of biases of row-parallel layers, which GPT-2 has, over the parts of the sequence. So GPT-2
is compared with Colossal-AI in the same mode, and Llama with Colossal-AI without sequence parallelism.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from colossal_hetero import BalanceConfig
from colossal_hetero.balance import BalancePlan
from colossal_hetero.layers import block_rules, hetero_layers
from tests.support.checks import on
from tests.support.language_models import MODELS, plan_of, train_on_tokens
from tests.support.migration_runs import assert_equal
from tests.support.training import Trained, assert_same_parameters, boost, ours, sgd, theirs

CASES = (("gpt2", "split_gather"), ("llama", "split_gather"), ("llama", "ring"))
REFERENCE = {"gpt2": "split_gather", "llama": None}  # the mode of Colossal-AI that a family is compared with


def options(mode: str | None) -> dict[str, Any]:
    sequence = {} if mode is None else dict(enable_sequence_parallelism=True, sequence_parallelism_mode=mode)
    return dict(tp_size=dist.get_world_size(), make_vocab_size_divisible_by=4, **sequence)


def boosted(family: str, sequence: str | None, **choices: Any) -> Trained:
    config = BalanceConfig(**(dict(mode="auto", warmup_iterations=10**6, measure_costs=False) | choices))
    return boost(ours(config, **options(sequence)), MODELS[family](layers=1), sgd)


@on(2)
@on(3)
def migration_is_exact_with_sequence_parallelism() -> None:
    """Each rank is slow in two iterations; its units migrate in the first one, and for good in the second one."""
    ranks = dist.get_world_size()
    for family, mode in (("gpt2", "split_gather"), ("llama", "ring")):
        what = f"{family}, {mode}, {ranks} ranks"
        expected = boost(theirs(custom_policy=None, **options(REFERENCE[family])), MODELS[family](layers=1), sgd)
        train_on_tokens(expected, 2 * ranks)
        run = boosted(family, mode, reshard_after=1)
        for sender in range(ranks):
            run.plugin.balancer.follow(plan_of(sender, ranks))
            train_on_tokens(run, 2)
            share = run.plugin.balancer.shares.migrated + run.plugin.balancer.shares.resharded
            assert run.plugin.balancer.has_resharded
            assert share > 0.2 if dist.get_rank() == sender else share == 0.0, f"{what}: {share}"
        with run.plugin.balancer.ordinary_shards():
            assert_equal(run, expected, what)


@on(2)
def without_a_plan_the_result_is_colossalais_bit_for_bit() -> None:
    for family, mode in CASES:
        expected = train_on_tokens(boost(theirs(custom_policy=None, **options(mode)), MODELS[family](layers=1), sgd), 2)
        # In mode "ring" only a balancer that balances nothing leaves the products as they are.
        run = boosted(family, mode, mode="off" if mode == "ring" else "auto")
        assert train_on_tokens(run, 2).losses == expected.losses
        assert_same_parameters(run.parameters, expected.parameters, f"{family}, {mode}")


@on(2)
def blocks_are_resized_with_sequence_parallelism() -> None:
    runs = []
    for mode in ("split_gather", "ring", None):
        run = boosted("llama", mode, mode="resize")
        run.plugin.balancer.follow(BalancePlan.resizing((0.0, 0.5)))
        runs.append(train_on_tokens(run, 2))
        assert (run.plugin.balancer.shares.resized > 0.2) == (dist.get_rank() == 1), run.plugin.balancer.shares
    assert_equal(runs[0], runs[2], "split_gather")
    assert_equal(runs[1], runs[2], "ring")


@on(2)
def attention_in_no_block_is_refused_or_stays_with_sequence_parallelism() -> None:
    rules = {name: rule for name, rule in block_rules.RULES.items() if name != "transformers.GPT2Attention"}
    with patch.object(block_rules, "RULES", rules):
        with pytest.raises(ValueError, match=r"attn\.c_attn, which is in no block.* choose mode 'auto'"):
            boosted("gpt2", "split_gather", mode="migrate")
        run = boosted("gpt2", "split_gather")
    assert {layer.block is None for layer in hetero_layers(run.model).values()} == {True, False}
    train_on_tokens(run, 1)
