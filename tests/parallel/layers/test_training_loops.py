"""Training is that of Colossal-AI's plugin whatever a loop does while units or columns migrate, and move for good."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.tensor.d_tensor import is_customized_distributed_tensor, is_distributed_tensor
from torch import Tensor, nn

from tests.support.checks import Checks, of_all_ranks
from tests.support.migration_runs import (
    ITERATIONS,
    METHODS,
    Watch,
    assert_equal,
    give,
    methods_for,
    migrating_run,
    reference_run,
    relative_difference,
)
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import Trained, batch, loss_of, train

checks = Checks()

STEPS = 3


def forward(run: Trained, number: int, size: int = 6) -> Tensor:
    images, labels = batch(number, size=size)
    loss = loss_of(run.model(images), labels)
    run.losses.append(loss.item())
    return loss


def backward(run: Trained, number: int, size: int = 6) -> None:
    run.booster.backward(forward(run, number, size), run.optimizer)


def finish(run: Trained) -> None:
    run.optimizer.step()
    run.optimizer.zero_grad()


def gradients(run: Trained) -> list[tuple[nn.Parameter, Tensor]]:
    return [(each, each.grad) for each in run.model.parameters() if each.grad is not None]


# Loops that change gradients or weights -----------------------------------------------------------------------------


def shorter_windows(clip: Callable[[Any], Any], run: Trained) -> None:
    for step, passes in enumerate((2, 3, 1)):
        for micro in range(passes):
            backward(run, 10 * step + micro)
        clip(run)
        finish(run)


def is_sharded(parameter: nn.Parameter) -> bool:
    return is_distributed_tensor(parameter) or is_customized_distributed_tensor(parameter)


def clip_by_norm(run: Trained) -> None:
    """By the norm of all shards, as code for tensor parallelism does it."""
    trained = [(gradient, is_sharded(each)) for each, gradient in gradients(run)]
    shards, replicated = (
        torch.stack([gradient.square().sum() for gradient, is_shard in trained if is_shard == wanted]).sum()
        for wanted in (True, False)
    )
    dist.all_reduce(shards)
    for gradient, _ in trained:
        gradient.mul_((0.05 / (shards + replicated).sqrt()).clamp(max=1))


def sharpness_aware(run: Trained) -> None:
    for step in range(STEPS):
        backward(run, step)
        before = [(each, each.detach().clone()) for each, _ in gradients(run)]
        with torch.no_grad():
            for each, gradient in gradients(run):
                each.add_(0.01 * torch.tanh(100 * gradient))
        run.model.zero_grad()
        backward(run, step)
        with torch.no_grad():
            for each, value in before:
                each.copy_(value)
        finish(run)


def sharpness_aware_under_no_sync(run: Trained) -> None:
    """As with data parallelism: the first pass is not summed. Weights change past their version counters."""
    for step in range(STEPS):
        with run.booster.no_sync(run.model, run.optimizer):
            backward(run, step)
        ascents = [(each, 0.01 * gradient.sign()) for each, gradient in gradients(run)]
        for each, ascent in ascents:
            each.data.add_(ascent)
        run.model.zero_grad()
        backward(run, step)
        for each, ascent in ascents:
            each.data.sub_(ascent)
        finish(run)


def changed_gradients(run: Trained) -> None:
    """Noise, a mask of pruned weights, and gradients of one loss taken away from those of another."""
    for step in range(STEPS):
        backward(run, step)
        for _, gradient in gradients(run):
            generator = torch.Generator().manual_seed(step)
            gradient.add_(torch.randn(gradient.shape, generator=generator), alpha=1e-3)
            gradient.mul_(torch.rand(gradient.shape, generator=generator) < 0.8)
        first = [(each, gradient.clone()) for each, gradient in gradients(run)]
        run.optimizer.zero_grad()
        backward(run, 100 + step, size=4)
        for each, gradient in first:
            assert each.grad is not None
            each.grad = each.grad - 0.3 * gradient
        finish(run)


def seen_by_hooks(run: Trained) -> None:
    for each in run.model.parameters():
        each.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    each = next(reversed(list(run.model.unwrap().blocks[0].mlp.parameters())))
    norms = run.losses

    def see(parameter: Tensor) -> None:
        assert parameter.grad is not None
        norms.append(float(parameter.grad.norm()))

    each.register_post_accumulate_grad_hook(see)
    for step in range(STEPS):
        for micro in range(1 + step % 2):
            backward(run, 2 * step + micro)
        finish(run)


def steps_in_the_backward_pass(run: Trained) -> None:
    def update(parameter: Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.05)
        parameter.grad = None

    for each in run.model.parameters():
        each.register_post_accumulate_grad_hook(update)
    for step in range(STEPS):
        for micro in range(1 + step % 2):
            backward(run, 2 * step + micro)
        finish(run)


def other_weights_before_backward(run: Trained) -> None:
    """Between the forward and the backward pass of a loss, other weights pass through the model: those of a teacher,
    without gradients, and changed ones of the student, forward and backward."""
    average = [each.detach().clone() for each in run.model.parameters()]
    for step in range(STEPS):
        loss = forward(run, step)
        own = [each.detach().clone() for each in run.model.parameters()]
        for each, mean in zip(run.model.parameters(), average, strict=True):
            each.data.copy_(mean)
        with torch.no_grad():
            forward(run, 50 + step)
        for each, value, mean in zip(run.model.parameters(), own, average, strict=True):
            each.data.copy_(value).add_(mean, alpha=0.1)
        backward(run, 70 + step)
        for each, value, mean in zip(run.model.parameters(), own, average, strict=True):
            each.data.copy_(value)
            mean.lerp_(value, 0.2)
        run.booster.backward(loss, run.optimizer)
        finish(run)


def gradients_without_backward(run: Trained) -> None:
    """``torch.autograd.grad``, as in penalties of first order and in the surgery of gradients."""
    for step in range(STEPS):
        parameters = [each for each in run.model.parameters() if each.requires_grad]
        found = torch.autograd.grad(forward(run, step), parameters)
        backward(run, 30 + step)
        for each, gradient in zip(parameters, found, strict=True):
            assert each.grad is not None
            each.grad.add_(gradient, alpha=0.5)
        finish(run)


def weights_that_change(run: Trained) -> None:
    """Weights change between the micro-batches of an iteration, in another way in each."""

    def scale() -> None:
        with torch.no_grad():
            for parameter in run.model.unwrap().parameters():
                parameter.mul_(0.9)

    def load() -> None:
        model = run.model.unwrap()
        model.load_state_dict({name: 1.1 * value for name, value in model.state_dict().items()})

    for iteration, change in enumerate((scale, run.optimizer.optim.step, load)):
        backward(run, 2 * iteration)
        change()
        backward(run, 2 * iteration + 1)
        finish(run)


# Loops that leave passes out, repeat or break them off -------------------------------------------------------------


def discarded_gradients(run: Trained) -> None:
    """The gradients of an incomplete iteration are discarded, as after a loss that is not a number."""
    train(run, 1)
    with run.booster.no_sync(run.model, run.optimizer):
        backward(run, 40)
    run.optimizer.zero_grad()
    train(run, 2, accumulation=2)


def _fail(*_: Any) -> None:
    raise ArithmeticError("a failure in the user's code")


def failures(run: Trained) -> None:
    """In each iteration, all ranks fail in the forward pass of one batch and the backward pass of another one."""
    block = run.model.unwrap().blocks[0]
    for iteration in range(ITERATIONS):
        for micro in range(3):
            images, labels = batch(3 * iteration + micro)
            place = (block, block.mlp.act)[iteration % 2]
            failing = place.register_forward_pre_hook(_fail) if micro == 1 else None
            with contextlib.suppress(ArithmeticError), run.booster.no_sync(run.model, run.optimizer):
                loss = loss_of(run.model(images), labels)
                if micro == 0:
                    loss.backward()
                run.losses.append(loss.item())
            if failing is not None:
                failing.remove()
        with contextlib.suppress(ArithmeticError), run.booster.no_sync(run.model, run.optimizer):
            failing = block.register_full_backward_pre_hook(_fail)
            loss_of(run.model(images), labels).backward()
        failing.remove()
        # What was accumulated is discarded, because a part of it may be missing.
        run.optimizer.zero_grad()
        train(run, 1, accumulation=2, same_batch=True)


def unused_passes(run: Trained) -> None:
    """Use batches of changing size, two forwards per backward, unused forward passes, and evaluation in between."""
    model = run.model
    for iteration in range(ITERATIONS):
        images, labels = batch(iteration, size=3 + iteration)
        with torch.no_grad():
            run.losses.append(loss_of(model(images), labels).item())  # in train mode
        more, more_labels = batch(50 + iteration, size=8 - iteration)
        loss = loss_of(model(images), labels) + loss_of(model(more), more_labels)
        run.losses.append(loss.item())
        run.booster.backward(loss, run.optimizer)
        model.eval()
        with torch.no_grad():
            run.losses.append(loss_of(model(more), more_labels).item())
        loss_of(model(images), labels)
        model.train()
        run.losses.append(loss_of(model(more), more_labels).item())  # a forward pass without a backward pass
        finish(run)


def blocks_left_out(run: Trained) -> None:
    """As layerdrop does."""
    block = run.model.unwrap().blocks[0]
    for step in range(STEPS):
        if step == 1:
            block.forward = nn.Identity().forward
        backward(run, step)
        finish(run)
        vars(block).pop("forward", None)


def the_model_inside(run: Trained) -> None:
    """The model that was given to ``boost``, which is inside the boosted one, is called and switched to training."""
    inner = run.model.unwrap()
    for iteration in range(ITERATIONS):
        images, labels = batch(iteration)
        run.model.eval()
        inner.train()
        loss = loss_of((inner if iteration % 2 else run.model)(images), labels)
        run.losses.append(loss.item())
        run.booster.backward(loss, run.optimizer)
        finish(run)


@dataclass(frozen=True)
class Loop:
    train: Callable[[Trained], None]
    columns: bool = False
    """Whether it is checked in column form too."""
    for_good: bool | None = False
    """Whether units can be permanently re-sharded: if the loop keeps no tensor of a parameter's shape from one step to
    the next. None: this is tried, and hooks prevent it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the plugin."""


LOOPS: dict[str, Loop] = {
    "changed gradients": Loop(changed_gradients),
    "clipping by norm": Loop(partial(shorter_windows, clip_by_norm), for_good=True),
    "clipping by the optimizer": Loop(
        partial(shorter_windows, lambda run: run.optimizer.clip_grad_by_norm(0.05)), for_good=True
    ),
    "sharpness-aware": Loop(sharpness_aware),
    "sharpness-aware under no_sync": Loop(sharpness_aware_under_no_sync, for_good=True),
    "hooks": Loop(seen_by_hooks, for_good=None),
    "steps in the backward pass": Loop(steps_in_the_backward_pass),
    "autograd.grad": Loop(gradients_without_backward, for_good=True),
    "other weights before backward": Loop(other_weights_before_backward),
    "weights that change": Loop(weights_that_change, columns=True),
    "discarded gradients": Loop(discarded_gradients, columns=True),
    "failures": Loop(failures, columns=True),
    "unused passes": Loop(unused_passes, columns=True),
    "blocks left out": Loop(blocks_left_out, options=dict(find_unused_parameters=True)),
    "the model inside": Loop(the_model_inside, columns=True),
}
ON_THREE_RANKS = ("clipping by norm", "sharpness-aware", "autograd.grad")


@checks.on(2)
@checks.on(3)
def a_loop_may_do_anything() -> None:
    world = dist.get_world_size()
    for number, (name, loop) in enumerate(LOOPS.items()):
        if world > 2 and name not in ON_THREE_RANKS and not IS_THOROUGH:
            continue
        options = dict(tp_size=world) | loop.options
        expected = reference_run(**options)
        loop.train(expected)
        for sender in range(world) if IS_THOROUGH else (number % world,):
            for method in METHODS[: 2 + number % 2] if loop.columns else METHODS[:1]:
                run = migrating_run(method, sender, **options)
                loop.train(run)
                assert run.plugin.balancer.plan.migrate[sender] > 0.1, name
                assert_equal(run, expected, f"{name}, {method}, sender {sender}")
            if loop.for_good is False:
                continue
            run = migrating_run("block", sender, choices=dict(reshard_after=1), **options)
            loop.train(run)
            assert run.plugin.balancer.has_resharded == (loop.for_good is True), name
            with run.plugin.balancer.ordinary_shards():
                assert_equal(run, expected, f"{name}, sender {sender}, for good")


# Messages -----------------------------------------------------------------------------------------------------------


@checks.on(2)
def weights_are_sent_and_gradients_return_in_each_pass() -> None:
    micro_batches, layers = 3, 4
    for no_sync, sender, column_form in ((True, 0, METHODS[1]), (False, 1, METHODS[2])):
        expected = train(reference_run(tp_size=2), ITERATIONS, micro_batches, no_sync=no_sync)
        for method in ("block", column_form):
            run = migrating_run(method, sender, tp_size=2)
            watch = Watch(run)
            train(run, ITERATIONS, micro_batches, each=watch, no_sync=no_sync)
            what = f"{method}, sender {sender}, no_sync={no_sync}"
            watch.assert_migrated(sender, what)
            assert_equal(run, expected, what)
            if method == "block":
                # All blocks' weights are sent in one message; each layer's gradients return in a separate message.
                messages = micro_batches * (1 if dist.get_rank() == sender else layers)
                assert watch.messages == [messages] * ITERATIONS, f"{what}: {watch.messages}"
                # A receiver returns as many gradients as it was sent weights.
                assert len(set(watch.bytes)) == len(set(of_all_ranks(watch.bytes[0]))) == 1, f"{what}: {watch.bytes}"


@checks.on(2)
def a_step_without_all_gradients_is_refused() -> None:
    """ZeRO takes gradients as they appear, so they cannot be completed later."""
    options = dict(tp_size=2, precision="bf16", zero_stage=1)
    run = migrating_run("block", 1, **options)
    train(run, 2)
    before = run.parameters
    images, labels = batch()
    with run.booster.no_sync(run.model, run.optimizer):
        run.booster.backward(loss_of(run.model(images), labels), run.optimizer)
    with pytest.raises(
        RuntimeError, match=r"inside no_sync\(\), so the ranks have different gradients.* outside no_sync\(\)"
    ):
        run.optimizer.step()
    for name, parameter in run.parameters.items():
        assert torch.equal(parameter, before[name]), f"{name} was changed by a step without all gradients"
    # After zero_grad training continues, and gradients that had not returned are discarded.
    run.optimizer.zero_grad()
    train(run, 2)
    expected = train(train(reference_run(**options), 2), 2)
    assert relative_difference(run.parameters, expected.parameters) <= 0.05


# Evaluation ---------------------------------------------------------------------------------------------------------


def evaluate(run: Trained, seen: list[Tensor]) -> None:
    """Append the logits of the model, and of a model with averaged weights, as they are stored by many averages: past
    the version counters of the parameters."""
    parameters = list(run.model.parameters())
    trained = [parameter.detach().clone() for parameter in parameters]
    for factor in (1.0, 0.5):
        for parameter, value in zip(parameters, trained, strict=True):
            parameter.data.copy_(factor * value)
        run.model.eval()
        for number in (98, 99):
            with torch.no_grad():
                seen.append(run.model(batch(number)[0]))
                # A part of the model, as in the extraction of features: by each rank's own units.
                seen.append(run.model.unwrap().forward_features(batch(number)[0]))
    for parameter, value in zip(parameters, trained, strict=True):
        parameter.data.copy_(value)
    run.model.train()


def train_and_evaluate(run: Trained, seen: list[Tensor]) -> Trained:
    """Evaluate between iterations, between micro-batches, and between a forward pass and its backward pass."""
    for iteration in range(ITERATIONS):
        for micro in range(2):
            images, labels = batch(2 * iteration + micro)
            loss = loss_of(run.model(images), labels)
            run.losses.append(loss.item())
            if iteration == ITERATIONS - 1:
                run.model.eval()
                with torch.inference_mode():
                    seen.append(run.model(batch(97)[0]).clone())
                run.model.train()
            run.booster.backward(loss, run.optimizer)
            if iteration % 2:
                evaluate(run, seen)
        finish(run)
        evaluate(run, seen)
    return run


@checks.on(2, 2)
@checks.on(3, 3)
def evaluation_while_units_migrate_gives_the_logits_of_the_unbalanced_model(world: int) -> None:
    expected: list[Tensor] = []
    plain = train_and_evaluate(reference_run(tp_size=world), expected)
    for method in methods_for(1) if world == 2 else ("block",):
        run = migrating_run(method, world - 1, tp_size=world)
        seen: list[Tensor] = []
        train_and_evaluate(run, seen)
        balancer = run.plugin.balancer
        assert sum(balancer.plan.migrate) > 0.1, method
        assert_equal(run, plain, method)
        for number, (actual, wanted) in enumerate(zip(seen, expected, strict=True)):
            torch.testing.assert_close(
                actual,
                wanted,
                rtol=1e-5,
                atol=1e-5 * float(wanted.abs().max()),
                msg=lambda text, method=method, number=number: f"{method}, evaluation {number}: {text}",
            )
        records = balancer.collect()
        assert records is None or [record.iteration for record in records] == list(range(ITERATIONS))


# Pipelines -----------------------------------------------------------------------------------------------------------

PIPELINE = dict(tp_size=2, pp_size=2, num_microbatches=3)


def hook_gradients(run: Trained, on: Sequence[int]) -> Trained:
    """On the ranks ``on``, limit the gradients of each micro-batch of what ranks do not share."""
    if dist.get_rank() in on:
        for each in filter(is_sharded, run.model.parameters()):
            each.register_hook(lambda gradient: gradient.clamp(-0.002, 0.002))
    return run


@checks.on(4)
def hooks_in_a_pipeline_see_each_micro_batch() -> None:
    everywhere, first = (0, 1, 2, 3), (0,)
    for on, sender in ((everywhere, 0), (first, 1)):
        expected = train(hook_gradients(reference_run(**PIPELINE), on), STEPS)
        # The ranks 0 and 1 share the layers of the first stage, 2 and 3 those of the second one.
        run = hook_gradients(migrating_run("block", (), **PIPELINE), on)
        give(run, (sender, 2 + sender))
        train(run, STEPS)
        assert run.plugin.balancer.plan.migrate[sender] > 0.1
        assert_equal(run, expected, f"hooks on {on}, sender {sender}")
    # Also hooks that are registered while units migrate.
    late = [migrating_run("block", 1, **PIPELINE), reference_run(**PIPELINE)]
    for run in late:
        train(hook_gradients(train(run, 1), first), 1)
    assert_equal(*late, "late hooks")


@checks.on(4)
def blocks_that_are_left_out_in_a_pipeline() -> None:
    """A block that is left out of some micro-batches, as layerdrop does, while units migrate in a pipeline."""
    runs = [migrating_run("block", (0, 2), **PIPELINE), reference_run(**PIPELINE)]
    for run in runs:
        block = run.model.unwrap().blocks[run.plugin.stage_manager.stage]
        whole, passes = block.forward, count()
        block.forward = lambda x, whole=whole, passes=passes: x * 1.0 if next(passes) % 3 == 1 else whole(x)
        train(run, STEPS)
    assert runs[0].plugin.balancer.plan.migrate[0] > 0.1
    assert_equal(*runs, "left out")


test_on_ranks = checks.test()
