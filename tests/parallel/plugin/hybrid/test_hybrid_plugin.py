"""The plugin equals Colossal-AI's bit for bit without a straggler, also on a CPU. Steps whose gradients are not the
sums over ranks are refused; other loops equal one process with all samples."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

from colossal_hetero import BalanceConfig
from colossal_hetero.layers import TimmViTPolicy, hetero_layers, hetero_policy
from tests.support import training
from tests.support.checks import on, with_colossalai_passes
from tests.support.language_models import gpt2, tokens
from tests.support.planning import ZERO_BUBBLE
from tests.support.training import CLASSES, Trained, assert_same_parameters, batch, boost, ours, sgd, theirs, tiny_vit

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
        "pp=2, tp=2, zero-bubble": dict(tp_size=2, depth=4, pp_size=2, **ZERO_BUBBLE),
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
        # In tensor parallelism, "off" does less of what "resize" does, which the zero-bubble schedule excludes.
        only_off = options["tp_size"] == 1 or options.get("pp_style") == "zbv"
        if options.get("pp_style") == "zbv":
            with pytest.raises(ValueError, match=r"balance mode 'resize' cannot be combined with use_zbv=True"):
                boost(ours(RESIZE, **options), tiny_vit(depth=depth))
        for mode in ("off",) if only_off else ("off", "resize") if name == "fp32" else ("resize",):
            with training.scripted():
                run = boost(ours(idle[mode], **options), tiny_vit(depth=depth))
            actual = training.train(run, 3, accumulation)
            assert actual.losses == expected.losses, f"{name}, {mode}"
            assert_same_parameters(actual.parameters, expected.parameters, f"{name}, {mode}")


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


# Sums of gradients ---------------------------------------------------------------------------------------------------


UNSUMMED = r"inside no_sync\(\), so the ranks have different gradients"
SAMPLES = 4  # of a batch of one replica
STAGES = dict(pp_size=2, microbatch_size=2)


def criterion(outputs: Any, inputs: Any) -> Tensor:
    return outputs["loss"] if isinstance(inputs, dict) else training.loss_of(outputs, inputs[1])


def own_batch(run: Trained, number: int) -> tuple[Tensor, Tensor]:
    return batch(number, int(run.plugin.pg_mesh.coordinate(run.plugin.dp_axis)), SAMPLES)


def loss(run: Trained, number: int) -> Tensor:
    images, labels = own_batch(run, number)
    return training.loss_of(run.model(images), labels)


def execute(run: Trained, samples: Any, synced: bool = True) -> None:
    with nullcontext() if synced else run.booster.no_sync(run.model, run.optimizer):
        run.booster.execute_pipeline(iter([samples]), run.model, criterion, run.optimizer)


def execute_both(run: Trained) -> None:
    for number in (0, 1):
        execute(run, text(number), synced=number == 1)
    finish(run)


def finish(run: Trained) -> None:
    training.make_step(run.optimizer)


def check_refused(run: Trained, words: str = UNSUMMED) -> None:
    before = run.parameters
    with pytest.raises(RuntimeError, match=words):
        run.optimizer.step()
    assert_same_parameters(run.parameters, before, "a refused step")
    run.optimizer.zero_grad()


def check_as_alone(run: Trained, steps: list[list[int]], tolerance: float) -> None:
    model = tiny_vit()
    optimizer = sgd(model)
    for numbers in steps:
        for number in numbers:
            images, labels = map(torch.cat, zip(*(batch(number, each, SAMPLES) for each in range(2)), strict=True))
            training.loss_of(model(images), labels).backward()
        training.make_step(optimizer)
    for name, value in run.parameters.items():
        expected = model.get_parameter(name)
        torch.testing.assert_close(value.float(), expected, rtol=1e-4, atol=tolerance, msg=name)


def text(number: int) -> dict[str, Tensor]:
    inputs, labels = (each[:2].repeat(2, 1) for each in tokens(number))
    return dict(input_ids=inputs, labels=labels, attention_mask=torch.ones_like(inputs))


def parts(number: int) -> list[dict[str, Tensor]]:
    return [{key: value[first : first + 2] for key, value in text(number).items()} for first in (0, 2)]


def check_as_language_model_alone(run: Trained) -> nn.Module:
    """The weights are those of one process that took a step with the batches 0 and 1, which is returned."""
    model = gpt2()
    optimizer = sgd(model)
    for part in (*parts(0), *parts(1)):
        (model(**part)["loss"] / 2).backward()
    optimizer.step()
    for name, value in run.parameters.items():
        if run.plugin.tp_size > 1 and "ln_" not in name:
            continue  # a shard
        expected = model.get_parameter(name)
        torch.testing.assert_close(value[: len(expected)], expected, rtol=1e-4, atol=1e-6, msg=name)
    return model


@on(4)
def check_pipelines() -> None:
    for options, tolerance in ((dict(zero_stage=0), 1e-6), (dict(zero_stage=1, precision="bf16"), 0.02)):
        run = boost(ours(tp_size=1, **STAGES, **options), tiny_vit(), sgd)
        execute(run, own_batch(run, 0), synced=False)
        check_refused(run)
        for number in (1, 2):
            execute(run, own_batch(run, number), synced=number == 2)
        finish(run)
        check_as_alone(run, [[1, 2]], tolerance)


@on(2)
def check_tied_stages() -> None:
    run = boost(ours(tp_size=1, custom_policy=None, **STAGES), gpt2(), sgd)
    execute(run, text(0), synced=False)
    check_refused(run)
    execute_both(run)
    alone = check_as_language_model_alone(run)
    with torch.no_grad():  # no stage has a gradient of the tied weight now
        result = run.booster.execute_pipeline(iter([text(2)]), run.model, criterion, None, True)
    expected = sum(alone(**part)["loss"] for part in parts(2)) / 2
    assert result["loss"] is None or result["loss"].item() == pytest.approx(expected.item(), rel=1e-5)


@on(2)
def check_two_optimizers() -> None:
    run = boost(ours(tp_size=1), tiny_vit(), lambda model: torch.optim.SGD(model.blocks.parameters(), lr=0.1))
    head = torch.optim.SGD(run.model.unwrap().head.parameters(), lr=0.1)
    _, second, *_ = run.booster.boost(run.model, head)
    other = Trained([], run.model, second, run.booster, run.plugin)
    with run.booster.no_sync(run.model, run.optimizer):
        run.booster.backward(loss(run, 0), run.optimizer)
    check_refused(other)
    check_refused(run)
    with run.booster.no_sync(run.model, run.optimizer):
        run.booster.backward(loss(run, 0), run.optimizer)
    run.booster.backward(loss(run, 1), second)
    for each in (run, other):
        finish(each)


def two_forward_passes(run: Trained) -> None:
    losses = [loss(run, number) for number in (0, 1)]
    for each in losses:
        run.booster.backward(each, run.optimizer)


def two_backward_passes(run: Trained) -> None:
    each = loss(run, 0) / 2
    run.optimizer.backward(each, retain_graph=True)
    run.optimizer.backward(each)
    run.booster.backward(loss(run, 1), run.optimizer)


def forward_inside_no_sync(run: Trained) -> None:
    with run.booster.no_sync(run.model, run.optimizer):
        losses = [loss(run, number) for number in (0, 1)]
        run.optimizer.backward(losses[0])
    run.optimizer.backward(losses[1])


def forward_outside_no_sync(run: Trained) -> None:
    losses = [loss(run, 0)]
    with run.booster.no_sync(run.model, run.optimizer):
        losses.append(loss(run, 1))
        run.optimizer.backward(losses[1])
    run.optimizer.backward(losses[0])


@on(2)
def check_loops() -> None:
    for options, tolerance in (
        ({}, 1e-6),
        (dict(find_unused_parameters=True), 1e-6),
        (dict(precision="bf16", zero_stage=1), 0.02),
    ):
        for loop in (two_forward_passes, two_backward_passes, forward_inside_no_sync, forward_outside_no_sync):
            run = boost(ours(tp_size=1, **options), tiny_vit(), sgd)
            for _ in range(2):
                loop(run)
                finish(run)
            check_as_alone(run, [[0, 1]] * 2, tolerance)


@on(2)
def check_static_graph() -> None:
    run = boost(ours(tp_size=1, static_graph=True), tiny_vit(), sgd)
    with pytest.raises(RuntimeError, match="with static_graph=True, DDP sums gradients only if there is one backward"):
        two_forward_passes(run)


@on(2)
def check_unused() -> None:
    model: Any = tiny_vit()
    model.last = nn.ModuleList([nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES)])
    model.register_forward_hook(lambda model, _, logits: model.last[dist.get_rank()](logits))
    run = boost(ours(tp_size=1), model, sgd)
    run.optimizer.backward(loss(run, 0))
    words = rf"has not used all parameters .*last\.{1 - dist.get_rank()}\.weight.*find_unused_parameters=True"
    check_refused(run, words)


SEQUENCE = dict(
    enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather", make_vocab_size_divisible_by=4
)
TWICE = r"the latest sum has counted them again; run all .* but the last inside no_sync\(\)"


def language_pass(run: Trained, number: int, synced: bool = True) -> None:
    for index, inputs in enumerate(parts(number)):
        with nullcontext() if synced and index else run.booster.no_sync(run.model, run.optimizer):
            run.booster.backward(run.model(**inputs)["loss"] / 2, run.optimizer)


@with_colossalai_passes(2)
def check_sequence_parallelism() -> None:
    run = boost(ours(tp_size=dist.get_world_size(), **SEQUENCE), gpt2(), sgd)
    language_pass(run, 0)
    language_pass(run, 1)
    check_refused(run, rf"with sequence parallelism \(split_gather\) {TWICE}")
    for drop in (run.optimizer.zero_grad, run.model.zero_grad, lambda: run.model.zero_grad(set_to_none=False)):
        drop()
        for number in (0, 1):
            language_pass(run, number, synced=number == 1)
    finish(run)
    check_as_language_model_alone(run)
    # Gradients that the optimizer does not have are summed again, and nobody uses them.
    half = lambda model: torch.optim.SGD(list(model.parameters())[::2], lr=0.1)  # noqa: E731
    run = boost(ours(tp_size=dist.get_world_size(), **SEQUENCE), gpt2(), half)
    for number in (0, 1):
        language_pass(run, number)
        finish(run)


@on(2)
def check_tied_twice() -> None:
    run = boost(ours(tp_size=1, **STAGES), gpt2(), sgd)
    execute(run, text(0))
    execute(run, text(1))
    check_refused(run, rf"weights that pipeline stages share {TWICE}")
    run.model.zero_grad()
    execute_both(run)
    check_as_language_model_alone(run)


@on(2, dict(zero_stage=1))
@on(2, dict(zero_stage=2, overlap_allgather=True))
@on(4, dict(zero_stage=1, **STAGES))
def check_shards(options: dict[str, Any]) -> None:
    def some_pass(number: int) -> None:
        if run.plugin.pp_size > 1:
            execute(run, own_batch(run, number))
        else:
            run.booster.backward(loss(run, number), run.optimizer)

    run = boost(ours(tp_size=1, precision="bf16", **options), tiny_vit(), sgd)
    some_pass(0)
    before = run.parameters
    for use in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, nn.utils.clip_grad_norm_):
        with pytest.raises(RuntimeError, match=r"each rank has another part of it; optimizer\.clip_grad_by_norm\(\)"):
            use(run.model.parameters(), 0.1)
        if run.plugin.pp_size == 1:
            with torch.no_grad():
                loss(run, 1)  # an evaluation in between
    run.model.zero_grad()
    with pytest.raises(RuntimeError, match=r"which only optimizer\.zero_grad\(\) removes"):
        run.optimizer.step()
    run.optimizer.zero_grad()
    assert_same_parameters(run.parameters, before, "a refused step")
    for number in (1, 2):
        some_pass(number)
    run.optimizer.clip_grad_by_norm(1e6)
    finish(run)
    check_as_alone(run, [[1, 2]], 0.02)
    some_pass(3)
    run.optimizer.step()
    run.model.zero_grad()
    with pytest.raises(RuntimeError, match=r"which only optimizer\.zero_grad\(\) removes"):
        some_pass(4)
