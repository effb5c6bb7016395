"""With ``torch.compile``, balanced layers run uncompiled, and the rest of the model is compiled."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from colossal_hetero.layers import hetero_layers
from tests.support.checks import Checks
from tests.support.migration_runs import ITERATIONS, Watch, assert_equal, seeded_migrating_run
from tests.support.sharding import shard
from tests.support.training import batch, tiny_vit, train

checks = Checks()


@checks.on(2)
def migration_is_exact_in_a_compiled_model() -> None:
    """The attention of this model has dropout inside, its MLP has not."""

    def make() -> nn.Module:
        return tiny_vit(depth=1, attn_drop_rate=0.2)

    expected = train(seeded_migrating_run(make, ()), ITERATIONS)
    run = seeded_migrating_run(make, 1)
    for module in (run.model.unwrap().blocks[0].attn, run.model.unwrap().blocks[0].mlp):
        module.compile(backend="eager")
    watch = Watch(run)
    train(run, ITERATIONS, each=watch)
    watch.assert_migrated(1, "compiled")
    assert_equal(run, expected, "compiled")
    assert counters["frames"]["ok"] > 0


@checks.on(2)
def idle_layers_of_a_compiled_model_compute_the_same() -> None:
    plain, compiled = (shard(tiny_vit(depth=1)) for _ in range(2))
    compiled.blocks[0].attn.compile(backend="eager")
    compiled.blocks[0].mlp.compile(backend="eager")
    images, _ = batch()
    for model in (plain, compiled):
        model(images).square().sum().backward()
    for expected, actual in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(actual.grad, expected.grad)


def files_that_run(layer: nn.Module) -> set[str]:
    """The files of all Python functions that a forward pass of ``layer`` calls."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        files.add(frame.f_code.co_filename)

    x = torch.randn(2, layer.in_features)
    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return files


@checks.on(1)
def an_idle_layer_does_not_switch_the_compiler_off() -> None:
    """That would take the host as long as launching a kernel."""
    for layer in hetero_layers(shard(tiny_vit(depth=1))).values():
        files = files_that_run(layer)
        assert any(file.endswith("layers/linear.py") for file in files)
        assert not any(file.endswith("torch/_dynamo/eval_frame.py") for file in files), layer


test_on_ranks = checks.test()
