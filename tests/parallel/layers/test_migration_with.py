"""Migration is exact together with features of the plugin: parallelism, precision, checkpointing and so on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from colossalai.shardformer.layer.utils import Randomizer
from timm.layers import set_reentrant_ckpt
from torch import Tensor, nn

from colossal_hetero.layers import hetero_layers
from tests.support.checks import Checks
from tests.support.migration_runs import (
    ITERATIONS,
    METHODS,
    Watch,
    assert_equal,
    methods_for,
    migrating_run,
    reference_run,
)
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import (
    Trained,
    tiny_vit,
    train,
)

checks = Checks()

PIPELINE = dict(tp_size=2, pp_size=2, num_microbatches=3)


def blocks_of(run: Trained) -> list[str]:
    """The names of the layers that belong to a block."""
    return [name for name, layer in hetero_layers(run.model).items() if layer.block is not None]


@contextmanager
def seeded() -> Iterator[None]:
    """Use the same random numbers in every run."""
    Randomizer._INDEX = 0
    torch.manual_seed(11)
    yield


@dataclass(frozen=True)
class Case:
    """Options and model of a training run in which one group has a straggler."""

    options: dict[str, Any]
    """Options of the plugin."""
    model: Callable[[], nn.Module | None] = lambda: None
    """Makes the model; None: that of :func:`migrating_run`."""
    accumulation: int = 1
    sender: int = 1
    """Global rank of the straggler."""
    methods: tuple[str, ...] | None = None
    """Methods to check; None: :func:`methods_for`. With dropout in blocks, these do not draw Colossal-AI's masks."""


def _checkpointed(reentrant: bool = False, depth: int = 1) -> nn.Module:
    model = tiny_vit(depth=depth)
    set_reentrant_ckpt(reentrant)
    model.set_grad_checkpointing()
    return model


def _frozen(trained: str) -> Callable[[], nn.Module]:
    """Make a model in which only parameters with ``trained`` in their name are trained."""

    def make() -> nn.Module:
        model = tiny_vit()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        return model

    return make


CASES: dict[int, dict[str, Case]] = {
    2: {
        "accumulated, clipped": Case(dict(tp_size=2, max_norm=0.05), accumulation=2, sender=0),
        "checkpointed": Case(dict(tp_size=2), _checkpointed, accumulation=2),
        "checkpointed, reentrant": Case(dict(tp_size=2), lambda: _checkpointed(reentrant=True), sender=0),
        "dropout outside of blocks": Case(dict(tp_size=2), partial(tiny_vit, pos_drop_rate=0.2, drop_path_rate=0.3)),
        "dropout in attention": Case(
            dict(tp_size=2), partial(tiny_vit, depth=1, attn_drop_rate=0.2), methods=METHODS[1:2]
        ),
        "dropout in MLPs": Case(
            dict(tp_size=2), partial(tiny_vit, depth=1, proj_drop_rate=0.2), sender=0, methods=METHODS[2:]
        ),
        "biases only": Case(dict(tp_size=2), _frozen("bias")),
        "second block only": Case(dict(tp_size=2), _frozen("blocks.1"), sender=0),
        "attention's weights only": Case(dict(tp_size=2), _frozen("qkv.weight")),
    },
    4: {
        "dp=2": Case(dict(tp_size=2), accumulation=2, sender=3),
        "dp=2, dp inside": Case(dict(tp_size=2, dp_outside=False), sender=1),
        "pp=2, first stage": Case(PIPELINE, accumulation=2, sender=1),
        "pp=2, last stage, checkpointed": Case(PIPELINE, partial(_checkpointed, depth=2), sender=3),
        "pp=2, interleaved": Case(
            dict(tp_size=2, pp_size=2, num_microbatches=2, pp_style="interleaved", num_model_chunks=2),
            partial(tiny_vit, depth=4),
            sender=3,
        ),
    },
}


def run_case(case: Case, method: str | None, what: str = "", iterations: int = ITERATIONS) -> Trained:
    """Train with Colossal-AI's plugin or, if a ``method`` is given, with our plugin and the straggler."""
    with seeded():
        if method is None:
            run = train(reference_run(case.model(), **case.options), iterations, case.accumulation)
            run.model._force_wait_all_gather()
            return run
        run = migrating_run(method, case.sender, case.model(), **case.options)
        watch = Watch(run)
        train(run, iterations, case.accumulation, each=watch)
        run.model._force_wait_all_gather()
    if method == "block":
        assert len(blocks_of(run)) == len(hetero_layers(run.model)), what
    group = dist.get_process_group_ranks(run.plugin.tp_group)
    if case.sender in group:
        watch.assert_migrated(group.index(case.sender), what)
    else:
        assert sum(watch.plans[-1].migrate) == 0 and not any(watch.messages), what
    return run


@checks.on(2)
@checks.on(4)
def migration_is_exact_with_each_feature_of_the_plugin() -> None:
    ranks = dist.get_world_size()
    for number, (name, case) in enumerate(CASES[ranks].items()):
        expected = run_case(case, None)
        methods = methods_for(number) if number % 3 == 0 or IS_THOROUGH else ("block",)
        for method in case.methods or methods:
            assert_equal(run_case(case, method, f"{name}, {method}"), expected, f"{name}, {method}")


HALF: dict[int, dict[str, Case]] = {
    2: {
        "bf16, clipped": Case(dict(tp_size=2, precision="bf16", max_norm=0.5), accumulation=2, sender=0),
        "fp16": Case(dict(tp_size=2, precision="fp16", initial_scale=2**8)),
    },
    4: {
        "ZeRO 1, gathered late": Case(
            dict(tp_size=2, precision="bf16", zero_stage=1, overlap_allgather=True), accumulation=2
        ),
        "ZeRO 2, fp16": Case(dict(tp_size=2, precision="fp16", initial_scale=2**8, zero_stage=2), sender=3),
        "pipeline": Case(PIPELINE | dict(precision="bf16"), sender=3),
    },
}


@checks.on(2)
@checks.on(4)
def migration_in_half_precision_is_as_close_to_fp32_as_training_without_it() -> None:
    in_fp32: dict[Any, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}

    def train_in_fp32(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters after training in fp32 without ZeRO, and how much training changed them."""
        of_half = ("zero_stage", "overlap_allgather", "initial_scale")
        whole = {key: value for key, value in case.options.items() if key not in of_half} | dict(precision="fp32")
        key = (tuple(sorted(whole.items())), case.model, case.accumulation)
        if key not in in_fp32:
            start = reference_run(case.model(), **whole).parameters
            exact = run_case(Case(whole, case.model, case.accumulation), None, iterations=3).parameters
            in_fp32[key] = exact, {name: exact[name] - start[name] for name in exact}
        return in_fp32[key]

    for number, (name, case) in enumerate(HALF[dist.get_world_size()].items()):
        exact, moved = train_in_fp32(case)
        plain = run_case(case, None, iterations=3).parameters

        def error(parameters: dict[str, Tensor], exact: Any = exact, moved: Any = moved) -> float:
            """The error of half precision, relative to the change of the parameters in training."""
            off = sum(float((parameters[name].float() - exact[name]).square().sum()) for name in exact)
            return math.sqrt(off / sum(float(change.square().sum()) for change in moved.values()))

        for method in METHODS[:2] if IS_THOROUGH or number == 0 else METHODS[:1]:
            migrated = run_case(case, method, f"{name}, {method}", iterations=3).parameters
            # Another order of summation gives other rounding errors, but not larger ones.
            assert error(migrated) <= 1.1 * error(plain) < 0.1, f"{name}, {method}"


test_on_ranks = checks.test()
