"""Dropout inside blocks: a unit's mask is the same on whichever rank computes the unit, so migration stays exact, also
in a compiled model, in which balanced layers run uncompiled. Features of torch that tensor-parallel layers do not have
are refused in words, with and without a plan."""

import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.shardformer.layer.utils import Randomizer
from timm.layers import set_reentrant_ckpt
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils import parametrizations

from colossal_hetero import BalanceConfig
from colossal_hetero.layers import hetero_layers
from colossal_hetero.layers.block import attach_blocks
from tests.parallel.layers.test_families import put_dropout_into_blocks
from tests.support import migration_runs
from tests.support.checks import on
from tests.support.language_models import gpt2, llama, plan_of, tokens, train_on_tokens
from tests.support.migration_runs import ITERATIONS, Watch, assert_equal, draw_by_unit, seeded_migrating_run
from tests.support.model_families import allow_cpu
from tests.support.sharding import shard
from tests.support.training import Trained, batch, boost, loss_of, ours, sgd, theirs, tiny_vit, train


def dropping_gpt2(layers: int = 1, residual: float = 0.1) -> nn.Module:
    return gpt2(layers, vocab_size=768, resid_pdrop=residual, embd_pdrop=residual, attn_pdrop=0.1)


def dropping_vit() -> nn.Module:
    return tiny_vit(depth=1, attn_drop_rate=0.2, proj_drop_rate=0.3)


def checkpointed_vit(reentrant: bool | None) -> nn.Module:
    """A vision transformer with dropout in all blocks and nowhere else; checkpointed unless ``reentrant`` is None."""
    model = put_dropout_into_blocks(tiny_vit(depth=1))
    if reentrant is not None:
        set_reentrant_ckpt(reentrant)
        model.set_grad_checkpointing()
    return model


@on(2)
def until_a_plan_divides_units_dropout_is_that_of_colossalai() -> None:
    allow_cpu()
    for make, loop, policy in (
        (partial(dropping_gpt2, residual=0.0), train_on_tokens, {"custom_policy": None}),
        (dropping_vit, train, {}),
    ):
        Randomizer._INDEX = 0
        model = make()
        torch.manual_seed(11)
        expected = loop(migration_runs.reference_run(model, tp_size=2, **policy), ITERATIONS)
        run = loop(seeded_migrating_run(make, ()), ITERATIONS)
        assert run.losses == expected.losses
        assert_equal(run, expected, str(make))


@on(2)
def a_pass_that_checkpointing_repeats_drops_the_same() -> None:
    expected = train(draw_by_unit(seeded_migrating_run(lambda: checkpointed_vit(None), ())), ITERATIONS, accumulation=2)
    for reentrant, sender in ((False, 0), (True, 1)):
        run = seeded_migrating_run(partial(checkpointed_vit, reentrant), sender)
        watch = Watch(run)
        train(run, ITERATIONS, accumulation=2, each=watch)
        watch.assert_migrated(sender, f"{reentrant=}")
        assert_equal(run, expected, f"{reentrant=}")


@on(2)
def attention_whose_kernel_draws_the_masks_is_in_no_block() -> None:
    allow_cpu()
    warns = pytest.warns(UserWarning, match=r"2 attention modules .*h\.0\.attn.* kernel")
    with warns if dist.get_rank() == 0 else nullcontext():
        blocks = attach_blocks(shard(dropping_gpt2(2), enable_flash_attention=True))
    assert [block.name for block in blocks] == ["transformer.h.0.mlp", "transformer.h.1.mlp"]


@on(1)
def an_idle_layer_does_not_switch_the_compiler_off() -> None:
    """That would take the host as long as launching a kernel."""
    for layer in hetero_layers(shard(tiny_vit(depth=1))).values():
        files: set[str] = set()
        sys.setprofile(lambda frame, event, _, files=files: files.add(frame.f_code.co_filename))
        try:
            layer(torch.randn(2, layer.in_features))
        finally:
            sys.setprofile(None)
        assert any(file.endswith("layers/linear.py") for file in files)
        assert not any(file.endswith("torch/_dynamo/eval_frame.py") for file in files), layer


@on(2)
def migration_is_exact_in_a_compiled_model() -> None:
    def make() -> nn.Module:
        return tiny_vit(depth=1, attn_drop_rate=0.2)

    expected = train(draw_by_unit(seeded_migrating_run(make, ())), ITERATIONS)
    run = seeded_migrating_run(make, 1)
    for module in (run.model.unwrap().blocks[0].attn, run.model.unwrap().blocks[0].mlp):
        module.compile(backend="eager")
    watch = Watch(run)
    train(run, ITERATIONS, each=watch)
    watch.assert_migrated(1, "compiled")
    assert_equal(run, expected, "compiled")
    assert counters["frames"]["ok"] > 0


# Refusals ------------------------------------------------------------------------------------------------------------


def runs(**options: Any) -> list[Trained]:
    """Colossal-AI's plugin, ours that only measures, and ours while rank 1 gives work away, by units or columns."""
    made = [boost(theirs(tp_size=2, **options), None, sgd), boost(ours(tp_size=2, **options), None, sgd)]
    for migration in ("block", "broadcast-reduce"):
        config = BalanceConfig(mode="migrate", migration=migration, warmup_iterations=10**6, measure_costs=False)
        made.append(boost(ours(config, tp_size=2, **options), None, sgd))
        made[-1].plugin.balancer.follow(plan_of(1, 2))
    return made


@on(2)
def second_derivatives_are_refused() -> None:
    def refused(loss: Tensor, inputs: Any) -> None:
        with pytest.raises(RuntimeError, match="create_graph=True does not work through tensor-parallel layers"):
            torch.autograd.grad(loss, inputs, create_graph=True)

    for run in runs():
        images, labels = batch()
        images.requires_grad_()
        refused(loss_of(run.model(images), labels), images)
        torch.autograd.grad(run.model(images).sum(), images)
        refused(loss_of(run.model(images), labels), [each for each in run.model.parameters() if each.requires_grad])
    run = boost(ours(tp_size=2, parallel_output=True), llama(), sgd)
    inputs, labels = tokens(0)
    loss = run.model(input_ids=inputs, attention_mask=torch.ones_like(inputs), labels=labels).loss
    refused(loss, list(run.model.parameters())[:1])


@on(2)
def autocast_around_training_passes_is_refused() -> None:
    for run in runs()[1:]:
        images, _ = batch()
        words = r"autocast to torch.bfloat16 .*precision='bf16'"
        with pytest.raises(RuntimeError, match=words), torch.autocast("cpu", dtype=torch.bfloat16):
            run.model(images)
        run.model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            cast = run.model(images)
        with torch.no_grad():
            torch.testing.assert_close(cast.float(), run.model(images), rtol=0.1, atol=0.1)


@on(2)
def weights_of_a_head_that_every_rank_has_may_be_computed_from_others() -> None:
    model = tiny_vit()
    parametrizations.weight_norm(model.head)
    run = boost(ours(tp_size=2), model, sgd)
    images, labels = batch()
    run.booster.backward(loss_of(run.model(images), labels), run.optimizer)
