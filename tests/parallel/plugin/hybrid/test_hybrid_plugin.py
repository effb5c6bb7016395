"""The plugin equals Colossal-AI's bit for bit without a straggler, refuses wrong arguments, and ends if a rank dies."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.pipeline.schedule.v_schedule import PipelineGraph
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from colossal_hetero import BalanceConfig, HeteroHybridParallelPlugin
from colossal_hetero.layers import TimmViTPolicy, hetero_layers, hetero_policy
from tests.support.checks import Checks
from tests.support.harness import errors_of_the_others, run_ranks
from tests.support.language_models import gpt2
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import (
    assert_same_parameters,
    batch,
    boost,
    loss_of,
    ours,
    scripted,
    sgd,
    theirs,
    tiny_vit,
    train,
)

checks = Checks()
IDLE = {
    "off": BalanceConfig(mode="off"),
    # This configuration exchanges times at the end of the second iteration.
    "resize": BalanceConfig(mode="resize", warmup_iterations=0, patience=1),
}
PIPELINE = dict(pp_size=2, num_microbatches=3)
SETTINGS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "fp32": dict(tp_size=2),
        "bf16": dict(tp_size=2, precision="bf16"),
        "fp16": dict(tp_size=2, precision="fp16", initial_scale=2**8),
        "clipped": dict(tp_size=2, max_norm=0.05),
        "bf16, clipped": dict(tp_size=2, precision="bf16", max_norm=0.05),
        "accumulated": dict(tp_size=2, accumulation=3),
        "data parallel only": dict(tp_size=1),
        "pipeline only": dict(tp_size=1, **PIPELINE),
    },
    3: {"tp=3": dict(tp_size=3)},
    4: {
        "dp=2, tp=2, accumulated": dict(tp_size=2, accumulation=2),
        "pp=2, tp=2, uneven stages": dict(tp_size=2, num_layers_per_stage=[1, 3], depth=4, **PIPELINE),
        "pp=2, tp=2, interleaved": dict(
            tp_size=2, pp_size=2, num_microbatches=2, pp_style="interleaved", num_model_chunks=2, depth=4
        ),
        "dp=2, tp=2, dp inside": dict(tp_size=2, dp_outside=False),
        "dp=2, tp=2, ZeRO 1": dict(tp_size=2, precision="bf16", zero_stage=1),
    },
}


def check_parity(settings: dict[str, dict[str, Any]]) -> None:
    for name, setting in settings.items():
        options = dict(setting)
        accumulation = options.pop("accumulation", 1)
        depth = options.pop("depth", 2)
        expected = train(boost(theirs(**options), tiny_vit(depth=depth)), 3, accumulation)
        assert all(math.isfinite(loss) for loss in expected.losses), f"{name}: {expected.losses}"
        for mode, balance in IDLE.items():
            if options["tp_size"] == 1 and mode != "off":
                continue
            if name != "fp32" and options["tp_size"] > 1 and mode == "off":
                continue  # does less of what "resize" does
            with scripted():
                actual = train(boost(ours(balance, **options), tiny_vit(depth=depth)), 3, accumulation)
            assert actual.losses == expected.losses, f"{name}, {mode}: {actual.losses} instead of {expected.losses}"
            assert_same_parameters(actual.parameters, expected.parameters, f"{name}, {mode}")


@pytest.mark.parametrize("world", SETTINGS)
def test_without_a_straggler_training_is_bit_for_bit_colossalais(world: int) -> None:
    run_ranks(world, check_parity, SETTINGS[world])


# The policy without the plugin, and other models ---------------------------------------------------------------------


@checks.on(2)
def check_policy_alone() -> None:
    expected = train(boost(theirs(tp_size=2)), 3)
    run = train(boost(theirs(tp_size=2, custom_policy=hetero_policy(tiny_vit()))), 3)
    assert hetero_layers(run.model), "Colossal-AI's plugin did not make this package's layers"
    assert run.losses == expected.losses
    assert_same_parameters(run.parameters, expected.parameters, "policy alone")
    # This package's plugin uses a given policy, with Colossal-AI's layers or with this package's.
    for policy in (TimmViTPolicy(), hetero_policy(tiny_vit())):
        run = train(boost(ours(tp_size=2, custom_policy=policy)), 3)
        assert hetero_layers(run.model) and run.losses == expected.losses


class OtherModel(nn.Module):
    """A model that is not a vision transformer, with one parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def bert() -> nn.Module:
    config = BertConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=4, intermediate_size=36, vocab_size=64, num_labels=3
    )
    torch.manual_seed(0)
    return BertForSequenceClassification(config)


@checks.on(2)
def check_two_models() -> None:
    plugin = ours(tp_size=2)
    booster = Booster(plugin=plugin)
    for model in (tiny_vit(), bert(), tiny_vit()):
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert hetero_layers(boosted), f"{type(model).__name__} was not sharded"
        if isinstance(model, BertForSequenceClassification):
            loss = boosted(torch.arange(8).view(2, 4), labels=torch.tensor([0, 2])).loss
        else:
            loss = loss_of(boosted(batch()[0]), batch()[1])
        booster.backward(loss, optimizer)
        optimizer.step()
        assert torch.isfinite(loss)
    # Without an optimizer nothing is trained, so nothing is balanced.
    boosted, *_ = booster.boost(tiny_vit())
    assert torch.isfinite(boosted(batch()[0])).all()


# Memory that the planner counts -----------------------------------------------------------------------------------


def bucket_share(pp_size: int) -> float:
    """Bytes of buckets beside the gradients, per byte of the rank's parameters."""
    run = boost(ours(tp_size=1, pp_size=pp_size, num_microbatches=pp_size), make_optimizer=sgd)
    wrapped = run.model.module
    if not isinstance(wrapped, DistributedDataParallel):
        return 0.0
    images, labels = batch()
    run.booster.backward(loss_of(run.model(images), labels), run.optimizer)
    parameters = list(wrapped.parameters())
    facts = wrapped._get_ddp_logging_data()
    # If gradients were views of the buckets, there would be no copy.
    assert not facts["gradient_as_bucket_view"]
    assert len({each.grad.untyped_storage().data_ptr() for each in parameters}) == len(parameters)
    buckets = sum(int(size) for size in facts["bucket_sizes"].split(","))
    return buckets / sum(each.numel() * each.element_size() for each in parameters)


@pytest.mark.parametrize(("ranks", "stages", "share"), [(1, 1, 1.0), (2, 2, 0.0)])
def test_buckets_hold_a_copy_of_the_gradients_without_a_pipeline(ranks: int, stages: int, share: float) -> None:
    assert run_ranks(ranks, bucket_share, stages) == [share] * ranks


# Refused ---------------------------------------------------------------------------------------------------------


def check_refused() -> list[str]:
    unraisable: list[str] = []
    sys.unraisablehook = lambda hook: unraisable.append(str(hook.exc_value))
    cases: list[tuple[str, dict[str, Any]]] = [
        (r"2 ranks cannot be divided by tp_size=3 × pp_size=1; start a multiple of 3 ranks", dict(tp_size=3)),
        (r"2 ranks cannot be divided by tp_size=2 × pp_size=2", dict(tp_size=2, pp_size=2, num_microbatches=2)),
        (r"tp_size=0 must be at least 1", dict(tp_size=0)),
        (r"pp_size=-1 must be at least 1", dict(tp_size=2, pp_size=-1)),
    ]
    for message, options in cases:
        with pytest.raises(ValueError, match=message):
            ours(**options)
    with pytest.raises(TypeError, match="tp_size"):
        HeteroHybridParallelPlugin(pp_size=1)
    with pytest.raises(TypeError, match="'speed'"):
        HeteroHybridParallelPlugin(tp_size=2, pp_size=1, speed=2)
    for balance in ("resize", {"mode": "resize"}):
        with pytest.raises(TypeError, match="BalanceConfig"):
            ours(balance, tp_size=2)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"no policy for tests\.parallel\.plugin\.hybrid\.test_hybrid_plugin\.OtherModel"
    ):
        boost(ours(tp_size=2), OtherModel())
    with pytest.raises(ValueError, match=r"tp_size=2 does not divide both the number of heads \(3\)"):
        boost(ours(tp_size=2), tiny_vit(num_heads=3))
    few = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=12, n_head=3, vocab_size=16))
    with pytest.raises(ValueError, match=r"tp_size=2 ranks: The number of attention heads .* num_attention_heads=3"):
        boost(ours(tp_size=2), few)
    resize = BalanceConfig(mode="resize")
    with pytest.raises(ValueError, match=r"balance mode 'resize' cannot be combined with fp8_communication=True"):
        boost(ours(resize, tp_size=2, fp8_communication=True))
    with pytest.raises(ValueError, match=r"use_fp8=True computes whole products .* mode 'resize' computes parts"):
        ours(resize, tp_size=2, use_fp8=True)
    with pytest.raises(ValueError, match=r"different BalanceConfigs: rank 0 .*'off'.*, rank 1 .*'resize'"):
        boost(ours(resize if dist.get_rank() == 1 else BalanceConfig(mode="off"), tp_size=2))
    adapters = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(RuntimeError, match=r"attn.c_attn .* a layer with lora adapters has no tensor-parallel form"):
        boost(ours(tp_size=2), get_peft_model(gpt2(), adapters))
    with pytest.raises(ValueError, match=r"LoRA with tp_size=2 is not possible"):
        ours(tp_size=2).enable_lora(gpt2(), lora_config=adapters)
    with pytest.warns(UserWarning, match="nothing to balance with tp_size=1"):
        ours(resize, tp_size=1)
    gc.collect()
    return unraisable


def test_arguments_that_cannot_work_are_refused() -> None:
    for unraisable in run_ranks(2, check_refused):
        assert not unraisable, f"errors while a refused plugin was deleted: {unraisable}"


@checks.on(4)
def check_zero_bubble() -> None:
    graph = PipelineGraph(
        n_stage=2, n_micro=6, f_cost=1, b_cost=1, w_cost=1, c_cost=1, f_mem=3, b_mem=-2, w_mem=-1
    ).get_v_schedule()
    options = dict(tp_size=2, pp_size=2, num_microbatches=6, pp_style="zbv", num_model_chunks=2, scheduler_nodes=graph)
    with pytest.raises(ValueError, match=r"balance mode 'resize' cannot be combined with use_zbv=True"):
        boost(ours(BalanceConfig(mode="resize"), **options), tiny_vit(depth=4))
    expected = train(boost(theirs(**options), tiny_vit(depth=4)), 2)
    run = train(boost(ours(**options), tiny_vit(depth=4)), 2)
    assert run.losses == expected.losses
    assert_same_parameters(run.parameters, expected.parameters, "zero-bubble")


# A rank that dies ------------------------------------------------------------------------------------------------


def check_death(options: dict[str, Any], victim: int, signal_number: int | None) -> None:
    with scripted(lambda rank, iteration: 4.0 if rank == victim else 1.0):
        run = boost(ours(BalanceConfig(mode="resize"), **options))

    def die(iteration: int) -> None:
        if iteration == 5 and dist.get_rank() == victim:
            if signal_number is None:
                os._exit(1)
            os.kill(os.getpid(), signal_number)

    train(run, 100, each=die)
    raise AssertionError("training ended without an error although a rank died")


@pytest.mark.parametrize(
    "world, victim, signal_number, options",
    [
        pytest.param(2, 1, None, dict(tp_size=2), id="exit-tp"),
        pytest.param(4, 3, signal.SIGKILL, dict(tp_size=2, **PIPELINE), id="kill-pp"),
        *[pytest.param(2, 0, signal.SIGKILL, dict(tp_size=2), id="kill-tp")] * IS_THOROUGH,
        *[pytest.param(4, 2, signal.SIGKILL, dict(tp_size=2), id="kill-dp")] * IS_THOROUGH,
    ],
)
def test_a_rank_that_dies_ends_the_run(
    world: int, victim: int, signal_number: int | None, options: dict[str, Any]
) -> None:
    """The other ranks do not wait forever; the collective that they are in raises an error."""
    errors = errors_of_the_others(world, check_death, options, victim, signal_number, victim=victim, seconds=90)
    assert all("RuntimeError" in error for error in errors)


test_policies_models_and_zero_bubble_schedules = checks.test()
