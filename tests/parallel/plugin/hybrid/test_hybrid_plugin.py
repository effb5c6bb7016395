"""The plugin equals Colossal-AI's bit for bit without a straggler, also on a CPU, and refuses wrong arguments."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

from colossal_hetero import BalanceConfig
from colossal_hetero.layers import TimmViTPolicy, hetero_layers, hetero_policy
from tests.support import training
from tests.support.checks import on
from tests.support.planned_runs import ZERO_BUBBLE
from tests.support.training import assert_same_parameters, batch, boost, ours, theirs, tiny_vit

RESIZE = BalanceConfig(mode="resize")
PIPELINE = dict(pp_size=2, num_microbatches=3)
INTERLEAVED = dict(pp_size=2, num_microbatches=2, pp_style="interleaved", num_model_chunks=2)
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
        "pp=2, tp=2, interleaved": dict(tp_size=2, depth=4, **INTERLEAVED),
        "dp=2, tp=2, dp inside": dict(tp_size=2, dp_outside=False),
        "dp=2, tp=2, ZeRO 1": dict(tp_size=2, precision="bf16", zero_stage=1),
    },
}


@on(2)
@on(3)
@on(4)
def without_a_straggler_training_is_bit_for_bit_colossalais() -> None:
    # Resizing exchanges times at the end of the second iteration.
    idle = {"off": BalanceConfig(mode="off"), "resize": BalanceConfig(mode="resize", warmup_iterations=0, patience=1)}
    for name, setting in SETTINGS[dist.get_world_size()].items():
        options = dict(setting)
        accumulation, depth = options.pop("accumulation", 1), options.pop("depth", 2)
        expected = training.train(boost(theirs(**options), tiny_vit(depth=depth)), 3, accumulation)
        assert all(math.isfinite(loss) for loss in expected.losses), f"{name}: {expected.losses}"
        # In tensor parallelism, "off" does less of what "resize" does.
        for mode in ("off",) if options["tp_size"] == 1 else ("off", "resize") if name == "fp32" else ("resize",):
            with training.scripted():
                run = boost(ours(idle[mode], **options), tiny_vit(depth=depth))
            actual = training.train(run, 3, accumulation)
            assert actual.losses == expected.losses, f"{name}, {mode}"
            assert_same_parameters(actual.parameters, expected.parameters, f"{name}, {mode}")


@on(4)
def zero_bubble_schedules_are_colossalais() -> None:
    options = dict(tp_size=2, pp_size=2, **ZERO_BUBBLE)
    with pytest.raises(ValueError, match=r"balance mode 'resize' cannot be combined with use_zbv=True"):
        boost(ours(RESIZE, **options), tiny_vit(depth=4))
    expected, run = (training.train(boost(make(**options), tiny_vit(depth=4)), 2) for make in (theirs, ours))
    assert run.losses == expected.losses
    assert_same_parameters(run.parameters, expected.parameters, "zero-bubble")


@on(2)
def a_policy_works_without_the_plugin_and_is_used_by_it() -> None:
    expected = training.train(boost(theirs(tp_size=2)), 3)
    plugins = [theirs(tp_size=2, custom_policy=hetero_policy(tiny_vit()))]
    plugins += [ours(tp_size=2, custom_policy=policy) for policy in (TimmViTPolicy(), hetero_policy(tiny_vit()))]
    for plugin in plugins:
        run = training.train(boost(plugin), 3)
        assert hetero_layers(run.model), "the model does not have this package's layers"
        assert run.losses == expected.losses
        assert_same_parameters(run.parameters, expected.parameters, "a policy")


def bert(layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(hidden_size=24, num_attention_heads=4, intermediate_size=36, vocab_size=64, num_labels=3)
    return BertForSequenceClassification(BertConfig(num_hidden_layers=layers, **sizes))


@on(2)
def one_plugin_boosts_several_models() -> None:
    booster = Booster(plugin=ours(tp_size=2))
    for model in (tiny_vit(), bert(), tiny_vit()):
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert hetero_layers(boosted), f"{type(model).__name__} was not sharded"
        if isinstance(model, BertForSequenceClassification):
            loss = boosted(torch.arange(8).view(2, 4), labels=torch.tensor([0, 2])).loss
        else:
            loss = training.loss_of(boosted(batch()[0]), batch()[1])
        booster.backward(loss, optimizer)
        optimizer.step()
        assert torch.isfinite(loss)
    with pytest.warns(UserWarning, match="nothing to balance with tp_size=1"):
        ours(RESIZE, tp_size=1)
    # Without an optimizer nothing is trained, so nothing is balanced.
    boosted, *_ = booster.boost(tiny_vit())
    assert torch.isfinite(boosted(batch()[0])).all()


@on(1, 1.0)
@on(2, 0.0)
def buckets_hold_a_copy_of_the_gradients_without_a_pipeline(share: float) -> None:
    """As the planner counts memory: bytes of buckets beside the gradients, per byte of the rank's parameters."""
    ranks = dist.get_world_size()
    run = boost(ours(tp_size=1, pp_size=ranks, num_microbatches=ranks), make_optimizer=training.sgd)
    wrapped = run.model.module
    assert isinstance(wrapped, DistributedDataParallel) == (share > 0)
    if not share:
        return
    images, labels = batch()
    run.booster.backward(training.loss_of(run.model(images), labels), run.optimizer)
    parameters, facts = list(wrapped.parameters()), wrapped._get_ddp_logging_data()
    # If gradients were views of the buckets, there would be no copy.
    assert not facts["gradient_as_bucket_view"]
    assert len({each.grad.untyped_storage().data_ptr() for each in parameters}) == len(parameters)
    buckets = sum(int(size) for size in facts["bucket_sizes"].split(","))
    assert buckets == share * sum(each.numel() * each.element_size() for each in parameters)
