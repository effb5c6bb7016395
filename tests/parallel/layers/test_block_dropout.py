"""Dropout inside blocks: whatever a plan divides, ranks draw equally outside of them, and repeated passes the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from colossalai.shardformer.layer.utils import Randomizer
from timm.layers import set_reentrant_ckpt
from torch import Tensor, nn

from colossal_hetero.balance.apply import Applier
from colossal_hetero.balance.plan import BalancePlan
from colossal_hetero.colossalai_support.corrections import replaced
from colossal_hetero.layers.block import attach_blocks
from colossal_hetero.layers.block_rules import rule_for
from colossal_hetero.layers.transport import Transport
from tests.support.checks import Checks, of_all_ranks
from tests.support.language_models import gpt2, train_on_tokens
from tests.support.migration_runs import (
    ITERATIONS,
    Watch,
    assert_equal,
    migrate,
    reference_run,
    seeded_migrating_run,
)
from tests.support.model_families import BUILDERS, SHARDING_OPTIONS, allow_cpu, family_loss
from tests.support.sharding import randomize, shard
from tests.support.training import tiny_vit, train

checks = Checks()
PROBABILITY = 0.3
DROPOUTS = dict(bert=2, gpt2=2, gptj=2, opt=2, t5=4, vit=2, whisper=10, blip2=8, llama=2, falcon=0)
"""How many blocks with dropout inside the models of each family have."""


def _put_dropout_into_blocks(model: nn.Module) -> None:
    for module in model.modules():
        rule = rule_for(type(module))
        for path in rule.dropouts if rule else ():
            owner, _, name = path.rpartition(".")
            holder = module.get_submodule(owner)
            if isinstance(getattr(holder, name, None), nn.Module):
                getattr(holder, name).p = PROBABILITY
            elif hasattr(holder, name):
                setattr(holder, name, PROBABILITY)


@contextmanager
def drawing_by_element() -> Iterator[None]:
    """As on a GPU, dropout advances the random state by the number of its elements; on a CPU by a constant."""
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def draw_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training and p > 0:
            torch.rand(x.shape)
        return dropout(x, p, training, inplace)

    def draw_attention(query: Tensor, *args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
        if dropout_p > 0:
            torch.rand(query.shape)
        return attention(query, *args, dropout_p=dropout_p, **kwargs)

    with replaced(F, dropout=draw_dropout, scaled_dot_product_attention=draw_attention):
        yield


@checks.on(2)
def after_blocks_of_each_family_ranks_draw_equally() -> None:
    """Rank 1 gives half of its units away, or prunes them."""
    allow_cpu()
    plans = [
        BalancePlan(resize=(0.0, 0.0), migrate=(0.0, 0.5), receive=(0.5, 0.0)),
        BalancePlan.resizing((0.0, 0.5)),
    ]
    for number, name in enumerate(DROPOUTS):
        torch.manual_seed(0)
        model, inputs = BUILDERS[name]()
        _put_dropout_into_blocks(randomize(model).train())
        sharded = shard(model, **SHARDING_OPTIONS.get(name, {}))
        blocks = attach_blocks(sharded)
        applier = Applier({}, blocks, migrate("block"), 100, Transport(dist.new_group()))
        assert all(block.dropout() is None for block in blocks), f"{name}: before a plan, dropout is Colossal-AI's"
        applier.apply(plans[number % 2])
        assert sum(block.dropout() is not None for block in blocks) == DROPOUTS[name], name
        applier.units.begin_pass()
        before = torch.get_rng_state()
        with drawing_by_element():
            family_loss(inputs)(sharded)
        states = of_all_ranks(torch.get_rng_state())
        assert torch.equal(*states), f"{name}: after the pass, ranks would draw other numbers"
        assert DROPOUTS[name] == 0 or not torch.equal(before, states[0]), f"{name}: passes would draw the same"


def vit_with_dropout() -> nn.Module:
    return tiny_vit(depth=2, attn_drop_rate=0.2, proj_drop_rate=0.3, pos_drop_rate=0.2, drop_path_rate=0.3)


@checks.on(3)
def what_ranks_hold_in_full_stays_equal_while_units_move() -> None:
    run = seeded_migrating_run(vit_with_dropout, 1)
    watch = Watch(run)
    with drawing_by_element():
        train(run, 3, each=watch)
    watch.assert_migrated(1, "dropout")
    whole = {name: value for name, value in run.model.unwrap().named_parameters() if "norm" in name or "head" in name}
    assert whole
    for name, value in whole.items():
        first, *others = of_all_ranks(value.detach())
        assert all(torch.equal(first, other) for other in others), name


@checks.on(2)
def until_a_plan_divides_units_dropout_is_that_of_colossalai() -> None:
    """Residual dropout is left out: Colossal-AI draws it differently on the ranks."""
    allow_cpu()
    for make, loop in (
        (partial(gpt2, 1, vocab_size=768, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.1), train_on_tokens),
        (partial(tiny_vit, depth=1, attn_drop_rate=0.2, proj_drop_rate=0.3), train),
    ):
        Randomizer._INDEX = 0
        model = make()
        torch.manual_seed(11)
        policy: dict[str, Any] = {} if loop is train else {"custom_policy": None}
        expected = loop(reference_run(model, tp_size=2, **policy), ITERATIONS)
        run = loop(seeded_migrating_run(make, ()), ITERATIONS)
        assert run.losses == expected.losses
        assert_equal(run, expected, str(make))


@checks.on(2)
def a_pass_that_checkpointing_repeats_drops_the_same() -> None:
    def make(reentrant: bool | None) -> nn.Module:
        """A vision transformer with dropout in attention; Colossal-AI's dropout of MLPs is not repeated anyway."""
        model = tiny_vit(depth=1, attn_drop_rate=PROBABILITY)
        if reentrant is not None:
            set_reentrant_ckpt(reentrant)
            model.set_grad_checkpointing()
        return model

    for reentrant, sender in ((False, 0), (True, 1)):
        expected = train(seeded_migrating_run(partial(make, None), sender), ITERATIONS, accumulation=2)
        run = seeded_migrating_run(partial(make, reentrant), sender)
        watch = Watch(run)
        train(run, ITERATIONS, accumulation=2, each=watch)
        watch.assert_migrated(sender, f"{reentrant=}")
        assert_equal(run, expected, f"{reentrant=}")


test_on_ranks = checks.test()
