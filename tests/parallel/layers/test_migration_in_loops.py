"""Migration is exact whatever a training loop does: accumulation, exceptions, unused passes, evaluation.

The reference is Colossal-AI's own plugin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.checks import Checks
from tests.support.migration_runs import (
    IN_FORCE,
    ITERATIONS,
    Watch,
    assert_equal,
    methods_for,
    migrating_run,
    reference_run,
    relative_difference,
    slow,
)
from tests.support.training import (
    Trained,
    batch,
    loss_of,
    train,
)

checks = Checks()

# Messages in an iteration of several micro-batches ---------------------------------------------------------------


def check_messages() -> None:
    micro_batches, layers = 4, 8
    sent: dict[int, set[int]] = {}
    for no_sync, others in ((True, [(1, "broadcast-reduce")]), (False, [(0, "scatter-gather")])):
        expected = train(reference_run(tp_size=2), ITERATIONS, micro_batches, no_sync=no_sync)
        for sender, method in ((0, "block"), (1, "block"), *others):
            run = migrating_run(method, slow(sender), tp_size=2)
            watch = Watch(run)
            train(run, ITERATIONS, micro_batches, each=watch, no_sync=no_sync)
            what = f"{method}, sender {sender}, no_sync={no_sync}"
            watch.assert_migrated(sender, what)
            assert_equal(run, expected, what)
            if method == "block":
                # All blocks' weights are sent in one message; each layer's gradients return in a separate message.
                messages = micro_batches * (1 if dist.get_rank() == sender else layers)
                assert watch.messages[IN_FORCE:] == [messages] * (ITERATIONS - IN_FORCE), f"{what}: {watch.messages}"
                sent.setdefault(sender, set()).update(watch.bytes[IN_FORCE:])
    # A receiver returns as many gradients as it was sent weights.
    assert all(len(volumes) == 1 for volumes in sent.values()), sent
    units = [torch.tensor([volume]) for volumes in sent.values() for volume in volumes]
    for volume in units:
        both = [torch.empty_like(volume) for _ in range(2)]
        dist.all_gather(both, volume)
        assert both[0] == both[1] > 0, both


def train_with_changing_accumulation(run: Trained, numbers: Sequence[int]) -> Trained:
    """Accumulate over another number of micro-batches in each iteration, and clip the gradients before the step.

    Some iterations begin anew after a backward pass, whose gradients the model drops.
    """
    for iteration, micro_batches in enumerate(numbers):
        if iteration % 3 == 0:
            images, labels = batch(500 + iteration)
            run.booster.backward(loss_of(run.model(images), labels), run.optimizer)
            run.model.zero_grad()
        for micro in range(micro_batches):
            images, labels = batch(10 * iteration + micro)
            loss = loss_of(run.model(images), labels)
            run.losses.append(loss.item())
            run.booster.backward(loss, run.optimizer)
        run.optimizer.clip_grad_by_value(0.02)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run


def check_changing_accumulation() -> None:
    numbers = (2, 1, 4, 4, 2, 3, 1, 3)
    expected = train_with_changing_accumulation(reference_run(tp_size=2), numbers)
    for sender in (0, 1):
        run = migrating_run("block", slow(sender), tp_size=2)
        train_with_changing_accumulation(run, numbers)
        assert run.plugin.balancer.plan.migrate[sender] > 0.1
        assert_equal(run, expected, f"sender {sender}")


@checks.on(2)
def weights_are_sent_and_gradients_return_in_each_pass() -> None:
    check_messages()
    check_changing_accumulation()


@checks.on(2)
def a_step_without_all_gradients_is_refused() -> None:
    """ZeRO takes gradients as they appear, so they cannot be completed later."""
    options = dict(tp_size=2, precision="bf16", zero_stage=1)
    run = migrating_run("block", slow(1), **options)
    train(run, IN_FORCE)
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
    expected = train(train(reference_run(**options), IN_FORCE), 2)
    assert relative_difference(run.parameters, expected.parameters) <= 0.01


@checks.on(2)
def discarded_gradients_leave_no_trace() -> None:
    """Discard the gradients of an incomplete iteration, as a loop does after a loss that is not a number, and go on."""
    runs = []
    for method in (None, *methods_for(0)):
        run = reference_run(tp_size=2) if method is None else migrating_run(method, slow(1), tp_size=2)
        train(run, IN_FORCE)
        images, labels = batch(40)
        with run.booster.no_sync(run.model, run.optimizer):
            run.booster.backward(loss_of(run.model(images), labels), run.optimizer)
        run.optimizer.zero_grad()
        runs.append(train(run, 2, accumulation=2))
        if method is not None:
            assert run.plugin.balancer.plan.migrate[1] > 0, method
            assert_equal(run, runs[0], method)


# Exceptions ----------------------------------------------------------------------------------------------------------


def _fail(*_: Any) -> None:
    raise ArithmeticError("a failure in the user's code")


def train_with_failures(run: Trained, iterations: int, each: Callable[[int], None] = lambda iteration: None) -> Trained:
    """In each iteration, all ranks fail in the forward pass of one batch and the backward pass of another one.

    The forward pass fails between two blocks and inside a block.
    """
    block = run.model.unwrap().blocks[1]
    for iteration in range(iterations):
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
        each(iteration)
    return run


@checks.on(2)
def training_goes_on_after_an_exception_on_all_ranks() -> None:
    expected = train_with_failures(reference_run(tp_size=2), ITERATIONS)
    for sender, method in ((0, "block"), (1, "block"), (1, "broadcast-reduce")):
        run = migrating_run(method, slow(sender), tp_size=2)
        watch = Watch(run)
        train_with_failures(run, ITERATIONS, watch)
        watch.assert_migrated(sender, method)
        assert_equal(run, expected, f"{method}, sender {sender}")


# What a training loop may do -----------------------------------------------------------------------------------------


def train_in_an_unusual_loop(run: Trained, iterations: int) -> Trained:
    """Use batches of changing size, two forwards per backward, unused forward passes, and evaluation in between."""
    model = run.model
    for iteration in range(iterations):
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
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run


@checks.on(2)
def migration_is_exact_in_an_unusual_training_loop() -> None:
    expected = train_in_an_unusual_loop(reference_run(tp_size=2), ITERATIONS)
    for sender in (0, 1):
        for method in methods_for(sender):
            run = migrating_run(method, slow(sender), tp_size=2)
            train_in_an_unusual_loop(run, ITERATIONS)
            assert run.plugin.balancer.plan.migrate[sender] > 0.1, method
            assert_equal(run, expected, f"{method}, sender {sender}")


@checks.on(2)
def the_model_inside_the_boosted_one_can_be_called() -> None:
    """Call the model that was given to ``boost``, which is inside the boosted one, and switch its training mode."""

    def loop(run: Trained) -> Trained:
        inner = run.model.unwrap()
        for iteration in range(ITERATIONS):
            images, labels = batch(iteration)
            run.model.eval()
            inner.train()
            loss = loss_of((inner if iteration % 2 else run.model)(images), labels)
            run.losses.append(loss.item())
            run.booster.backward(loss, run.optimizer)
            run.optimizer.step()
            run.optimizer.zero_grad()
        return run

    expected = loop(reference_run(tp_size=2))
    for method in methods_for(1):
        run = migrating_run(method, slow(1), tp_size=2)
        loop(run)
        assert run.plugin.balancer.plan.migrate[1] > 0.1, method
        assert_equal(run, expected, method)


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
        run.optimizer.step()
        run.optimizer.zero_grad()
        evaluate(run, seen)
    return run


def _noting_widths(widths: list[int]) -> Callable[..., None]:
    """A hook like those of the package, which do not keep units from migrating."""

    def note(layer: nn.Module, _: Any, output: Tensor) -> None:
        widths.append(output.shape[-1])

    note.__module__ = "colossal_hetero"
    return note


@checks.on(2, 2)
@checks.on(3, 3)
def evaluation_uses_migrated_units_and_gives_the_logits_of_the_unbalanced_model(world: int) -> None:
    expected: list[Tensor] = []
    plain = train_and_evaluate(reference_run(tp_size=world), expected)
    for method in methods_for(1) if world == 2 else ("block",):
        run = migrating_run(method, slow(world - 1), tp_size=world)
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
        # The slow rank computes fewer units also in evaluation, and other ranks more.
        widths: list[int] = []
        layer = run.model.unwrap().blocks[0].mlp.fc1
        layer.register_forward_hook(_noting_widths(widths))
        evaluate(run, [])
        own = layer.weight.shape[0]
        units = balancer.shares.loads[layer.kind] if method == "block" else own
        assert units == own or method == "block"
        assert (units < own) == (dist.get_rank() == world - 1 and method == "block")
        assert widths == [units, own] * 4, f"{method}: {widths} instead of {units}"


test_on_ranks = checks.test()
