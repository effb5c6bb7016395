"""With ``torch.compile``, balanced layers run uncompiled, and the rest of the model is compiled."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch._dynamo.utils import counters

from colossal_hetero.layers import hetero_layers
from colossal_hetero.layers.language_head import OwnLogits
from tests.parallel.layers.test_language_head import boosted, outputs_of, reference, z_loss
from tests.support.checks import Checks
from tests.support.language_models import plan_of, tokens
from tests.support.migration_runs import ITERATIONS, Watch, assert_equal, draw_by_unit, seeded_migrating_run
from tests.support.sharding import shard
from tests.support.training import tiny_vit, train

checks = Checks()


@checks.on(1)
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


@checks.on(2)
def migration_is_exact_in_a_compiled_model() -> None:
    """The attention of this model has dropout inside, its MLP has not."""

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


@checks.on(2)
def a_compiled_language_model_has_the_loss_and_the_logits() -> None:
    """The whole model is compiled: what depends on the plan is not."""
    torch._dynamo.config.optimize_ddp = False
    runs = [reference("llama", {}, {}), boosted("llama", {}, {})]
    runs[1].model.unwrap().compile(backend="eager")
    for step in range(2):
        if step == 1:
            runs[1].plugin.balancer.follow(plan_of(1, 2))
        inputs, labels = tokens(step)
        for run in runs:
            output = outputs_of(run, inputs, labels)
            loss = z_loss(output, labels, None)
            run.finish(loss)
            run.losses.append(loss.item())
    assert type(output.logits) is OwnLogits
    assert_equal(runs[1], runs[0], "compiled")


test_on_ranks = checks.test()
