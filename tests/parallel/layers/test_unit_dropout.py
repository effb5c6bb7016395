"""Dropout inside blocks: a unit's mask is the same on whichever rank computes the unit, so migration stays exact."""

from __future__ import annotations

import copy
import traceback
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.shardformer.layer.utils import Randomizer
from timm.layers import set_reentrant_ckpt
from torch import nn

from colossal_hetero.balance.apply import Applier
from colossal_hetero.balance.plan import BalancePlan
from colossal_hetero.layers.block import Block, _has_dropout, attach_blocks
from colossal_hetero.layers.block_rules import rule_for
from colossal_hetero.layers.dropout import UnitDropout
from colossal_hetero.layers.transport import Transport
from colossal_hetero.layers.unit_layout import UnitRange
from colossal_hetero.layers.workload import Surrounded
from tests.support.checks import Checks
from tests.support.harness import run_ranks
from tests.support.language_models import gpt2, train_on_tokens
from tests.support.migration_runs import (
    ITERATIONS,
    Watch,
    assert_equal,
    draw_by_unit,
    give,
    migrate,
    reference_run,
    seeded_migrating_run,
)
from tests.support.model_families import BUILDERS, SHARDING_OPTIONS, allow_cpu, family_loss
from tests.support.sharding import _assert_loss_and_gradients, _loss_and_gradients, own_share, randomize, shard
from tests.support.training import tiny_vit, train

checks = Checks()


def gpt2_with_dropout(layers: int = 1) -> nn.Module:
    """Its vocabulary is a multiple of 64 · ranks, so that the embedding is not padded."""
    return gpt2(layers, vocab_size=768, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)


def vit_with_dropout() -> nn.Module:
    return tiny_vit(depth=1, attn_drop_rate=0.2, proj_drop_rate=0.3)


def checkpointed_vit(reentrant: bool | None) -> nn.Module:
    """A vision transformer with dropout in all blocks and nowhere else; checkpointed unless ``reentrant`` is None."""
    model = tiny_vit(depth=1)
    _put_dropout_into_blocks(model)
    if reentrant is not None:
        set_reentrant_ckpt(reentrant)
        model.set_grad_checkpointing()
    return model


@checks.on(2)
@checks.on(3)
def training_with_dropout_in_blocks_does_not_depend_on_the_plan() -> None:
    """No rank gives units away, and each rank in turn."""
    allow_cpu()
    ranks = dist.get_world_size()
    models = [(gpt2_with_dropout, train_on_tokens), (vit_with_dropout, train)]
    # On more ranks one model is enough: that masks are in the right places does not depend on the model.
    for make, loop in models if ranks == 2 else models[:1]:
        expected = draw_by_unit(seeded_migrating_run(make, ()))
        for _ in range(ranks):
            loop(expected, 2)
        run = seeded_migrating_run(make, ())
        for sender in range(ranks):
            give(run, sender)
            loop(run, 2)
        layers = {id(layer) for layer in run.plugin.balancer._layers.values()}
        in_blocks = {id(layer) for block in run.plugin.balancer._applier._blocks for layer in block.layers}
        assert in_blocks == layers, f"{make.__name__}: {len(in_blocks)} of {len(layers)} layers are in a block"
        assert_equal(run, expected, make.__name__)


@checks.on(2)
def until_a_plan_divides_units_dropout_is_that_of_colossalai() -> None:
    """Residual dropout is left out: Colossal-AI draws it differently on the ranks."""
    allow_cpu()
    for make, loop in (
        (partial(gpt2, 1, vocab_size=768, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.1), train_on_tokens),
        (vit_with_dropout, train),
    ):
        Randomizer._INDEX = 0
        model = make()
        torch.manual_seed(11)
        policy = {} if loop is train else {"custom_policy": None}
        expected = loop(reference_run(model, tp_size=2, **policy), ITERATIONS)
        run = loop(seeded_migrating_run(make, ()), ITERATIONS)
        assert run.losses == expected.losses
        assert_equal(run, expected, str(make))


@checks.on(2)
def a_pass_that_checkpointing_repeats_drops_the_same() -> None:
    expected = train(draw_by_unit(seeded_migrating_run(lambda: checkpointed_vit(None), ())), ITERATIONS, accumulation=2)
    for reentrant, sender in ((False, 0), (True, 1)):
        run = seeded_migrating_run(lambda reentrant=reentrant: checkpointed_vit(reentrant), sender)
        watch = Watch(run)
        train(run, ITERATIONS, accumulation=2, each=watch)
        watch.assert_migrated(sender, f"{reentrant=}")
        assert_equal(run, expected, f"{reentrant=}")


@checks.on(2)
def attention_whose_kernel_draws_the_masks_is_in_no_block() -> None:
    allow_cpu()
    with (
        pytest.warns(UserWarning, match=r"2 attention modules .*h\.0\.attn.* kernel")
        if dist.get_rank() == 0
        else nullcontext()
    ):
        blocks = attach_blocks(shard(gpt2_with_dropout(2), enable_flash_attention=True))
    assert [block.name for block in blocks] == ["transformer.h.0.mlp", "transformer.h.1.mlp"]


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


def _draw_as_the_ranks(model: nn.Module, blocks: list[Block]) -> int:
    """Let the unsharded ``model`` draw the masks of all ranks' units; returns how many modules have dropout inside."""
    attached = 0
    for block in blocks:
        module = model.get_submodule(block.name)
        rule = rule_for(type(module))
        if not _has_dropout(module, rule):
            continue
        everything = [UnitRange(rank, 0, block.units) for rank in range(dist.get_world_size())]
        dropout = UnitDropout(block.name, block.units, -1 if rule.heads is None else -3, lambda all=everything: all)
        first = next(module.get_submodule(path) for path in rule.inputs)
        vars(module)["forward"] = Surrounded(module, partial(dropout.between, first, module.get_submodule(rule.output)))
        attached += 1
    return attached


def check_families() -> dict[str, Any]:
    results: dict[str, Any] = {}
    allow_cpu()
    for number, name in enumerate(DROPOUTS):
        try:
            torch.manual_seed(0)
            model, inputs = BUILDERS[name]()
            _put_dropout_into_blocks(randomize(model).train())
            reference = copy.deepcopy(model)
            sharded = shard(model, **SHARDING_OPTIONS.get(name, {}))
            blocks = attach_blocks(sharded)
            results[name] = _draw_as_the_ranks(reference, blocks)
            loss, gradients = _loss_and_gradients(reference, family_loss(inputs))
            shares = {
                name: own_share(parameter, gradients[name])
                for name, parameter in sharded.named_parameters()
                if gradients[name] is not None
            }
            applier = Applier({}, blocks, migrate("block"), 100, Transport(dist.new_group()))

            def follow(migrate: tuple[float, ...], _: nn.Module, applier: Applier = applier) -> None:
                applier.end_iteration()
                applier.apply(BalancePlan(resize=(0.0, 0.0), migrate=migrate, receive=migrate[::-1]))
                applier.units.begin_pass()

            plans = [partial(follow, shares) for shares in ((0.5, 0.0), (0.0, 0.5))[number % 2 :]]
            _assert_loss_and_gradients(sharded, family_loss(inputs), plans, loss, shares)
        except Exception:
            results[name] = traceback.format_exc()
    return results


def test_families_with_dropout_compute_the_same_as_their_unsharded_model_with_the_same_masks() -> None:
    for rank, outcome in enumerate(run_ranks(2, check_families)):
        failures = {name: found for name, found in outcome.items() if found != DROPOUTS[name]}
        assert not failures, "\n".join(f"{name}, rank {rank}:\n{found}" for name, found in failures.items())


test_on_ranks = checks.test()
