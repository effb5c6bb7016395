"""What a loop sees and changes between a backward pass and the step is the same while units migrate.

The reference is Colossal-AI's own plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.tensor.d_tensor import is_customized_distributed_tensor, is_distributed_tensor
from torch import Tensor, nn

from tests.support.checks import Checks
from tests.support.migration_runs import assert_equal, migrate, migrating_run, reference_run, slow
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import Trained, batch, boost, loss_of, ours, scripted, sgd, train

checks = Checks()


STEPS = 7


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


def shorter_windows(clip: Callable[[Any], Any], run: Trained) -> None:
    for step, passes in enumerate((3, 3, 2, 3, 1, 2, 1)):
        for micro in range(passes):
            backward(run, 10 * step + micro)
        clip(run)
        finish(run)


def is_sharded(parameter: nn.Parameter) -> bool:
    return is_distributed_tensor(parameter) or is_customized_distributed_tensor(parameter)


def clip_by_value(run: Trained) -> None:
    nn.utils.clip_grad_value_(run.model.parameters(), 0.002)


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


def sharpness_aware(change: str, run: Trained) -> None:
    for step in range(STEPS):
        backward(run, step)
        before = [(each, each.detach().clone()) for each, _ in gradients(run)]
        with torch.no_grad():
            for each, gradient in gradients(run):
                ascent = 0.01 * torch.tanh(100 * gradient)
                each.data.add_(ascent) if change == "data" else each.add_(ascent)
        run.model.zero_grad()
        backward(run, step)
        for each, value in before:
            if change == "data":
                each.data = value
            else:
                with torch.no_grad():
                    each.copy_(value)
        finish(run)


def sharpness_aware_under_no_sync(run: Trained) -> None:
    """As with data parallelism: the first pass is not summed."""
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


def teacher_in_training_mode(run: Trained) -> None:
    """The student's weights are replaced by an average for a forward pass whose loss is not used backward."""
    average = [each.detach().clone() for each in run.model.parameters()]
    for step in range(STEPS):
        backward(run, step)
        own = [each.detach().clone() for each in run.model.parameters()]
        for each, mean in zip(run.model.parameters(), average, strict=True):
            each.data.copy_(mean)
        forward(run, 50 + step)
        for each, value, mean in zip(run.model.parameters(), own, average, strict=True):
            each.data.copy_(value)
            mean.lerp_(value, 0.2)
        backward(run, 20 + step)
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


LOOPS: dict[str, Callable[[Trained], None]] = {
    "clipping by value": partial(shorter_windows, clip_by_value),
    "clipping by norm": partial(shorter_windows, clip_by_norm),
    "clipping by the optimizer": partial(shorter_windows, lambda run: run.optimizer.clip_grad_by_norm(0.05)),
    "sharpness-aware": partial(sharpness_aware, "data"),
    "sharpness-aware, in place": partial(sharpness_aware, "in place"),
    "sharpness-aware under no_sync": sharpness_aware_under_no_sync,
    "changed gradients": changed_gradients,
    "hooks": seen_by_hooks,
    "steps in the backward pass": steps_in_the_backward_pass,
    "teacher in training mode": teacher_in_training_mode,
    "other weights before backward": other_weights_before_backward,
    "autograd.grad": gradients_without_backward,
}


RESHARDED = (
    "clipping by value",
    "clipping by norm",
    "clipping by the optimizer",
    "sharpness-aware",
    "sharpness-aware under no_sync",
    "autograd.grad",
)
"""Loops that keep no tensor of a parameter's shape from one step to the next."""


@checks.on(2)
@checks.on(3)
def a_loop_may_do_anything_with_gradients() -> None:
    """While units migrate, and after they were permanently re-sharded, except where hooks may hold their shapes."""
    world = dist.get_world_size()
    for number, (name, loop) in enumerate(LOOPS.items()):
        if world > 2 and number % 2 and not IS_THOROUGH:
            continue  # on more ranks each second loop
        expected = reference_run(tp_size=world)
        loop(expected)
        for sender in range(world) if IS_THOROUGH else (number % world,):
            run = migrating_run("block", slow(sender), tp_size=world)
            loop(run)
            assert run.plugin.balancer.plan.migrate[sender] > 0.1, name
            assert_equal(run, expected, f"{name}, sender {sender}")
            if name not in (*RESHARDED, "hooks"):
                continue
            with scripted(slow(sender)):
                run = boost(ours(migrate("block", reshard_after=1), tp_size=world), None, sgd)
            loop(run)
            assert run.plugin.balancer.has_resharded == (name in RESHARDED), name
            with run.plugin.balancer.ordinary_shards():
                assert_equal(run, expected, f"{name}, sender {sender}, for good")


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
    for on, sender in ((everywhere, 0), (everywhere, 1), (first, 0), (first, 1)):
        expected = train(hook_gradients(reference_run(**PIPELINE), on), STEPS)
        # The ranks 0 and 1 share the layers of the first stage, 2 and 3 those of the second one.
        run = train(hook_gradients(migrating_run("block", slow(sender, 2 + sender), **PIPELINE), on), STEPS)
        assert run.plugin.balancer.plan.migrate[sender] > 0.1
        assert_equal(run, expected, f"hooks on {on}, sender {sender}")
    run = train(migrating_run("block", slow(1), **PIPELINE), 4)
    hook_gradients(run, first)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"a hook was registered on a parameter of .* while units migrate"):
            train(run, 1)


@checks.on(4)
def blocks_that_are_left_out_in_a_pipeline_are_refused() -> None:
    """A block that is left out of some micro-batches, as layerdrop does, while units migrate in a pipeline."""
    run = train(migrating_run("block", slow(0, 2), **PIPELINE), 4)
    assert run.plugin.balancer.plan.migrate[0] > 0.1
    block = run.model.unwrap().blocks[run.plugin.stage_manager.stage]
    whole, passes = block.forward, count()
    block.forward = lambda x: x * 1.0 if next(passes) % 3 == 1 else whole(x)
    with pytest.raises(RuntimeError, match=r"ran in 2 of 3 micro-batches, .*left out at random"):
        train(run, 1)


test_on_ranks = checks.test()
