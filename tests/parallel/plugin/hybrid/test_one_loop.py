"""One training loop, with ``booster.execute_pipeline``, for every plan: with a pipeline or without one."""

from collections import UserDict
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from colossalai.booster import Booster
from torch.utils.data import TensorDataset
from transformers import BatchEncoding

from colossal_hetero import BatchConfig, HeteroHybridParallelPlugin
from colossal_hetero.planner.cost.plan import Plan
from tests.support.checks import on
from tests.support.harness import run_ranks
from tests.support.planned_runs import ITERATIONS, MICRO_BATCH, MICRO_BATCHES, images_and_labels, share
from tests.support.planning import make_plan, planned, unequal_plan
from tests.support.training import (
    assert_same_parameters,
    boost,
    by_labels,
    loss_of,
    make_step,
    ours,
    sgd,
    theirs,
    tiny_vit,
    train_alone,
)
from tests.support.zero_runs import unmeasured

MAX_NORM = 0.5  # below the norm of the gradients, so that they are clipped
ALONE, DP2, PP2 = make_plan([[[0]]], (2,)), make_plan([[[1]], [[0]]], (2,)), make_plan([[[0], [1]]], (1, 1))
UNEQUAL = unequal_plan(make_plan([[[0]]], (2,), MICRO_BATCH, 1), make_plan([[[1], [2]]], (1, 1), MICRO_BATCH, 3))


def check_as_an_accumulating_loop(rank_order: list[Any], options: dict[str, Any]) -> None:
    plan = make_plan(rank_order, (2,))
    run = boost(planned(plan, max_norm=MAX_NORM, **options), make_optimizer=sgd)
    other = boost(theirs(tp_size=plan.tensor_parallel, max_norm=MAX_NORM, **options), make_optimizer=sgd)
    for iteration in range(ITERATIONS):
        batch = [part[share(run.plugin)] for part in images_and_labels(iteration, plan.global_batch)]
        loss = run.booster.execute_pipeline(iter([batch]), run.model, by_labels, run.optimizer)["loss"]
        expected = torch.zeros(())
        for number in range(MICRO_BATCHES):
            images, labels = (part[number * MICRO_BATCH : (number + 1) * MICRO_BATCH] for part in batch)
            synchronized = number == MICRO_BATCHES - 1 or options.get("zero_stage") == 2
            with nullcontext() if synchronized else other.booster.no_sync(other.model, other.optimizer):
                part = loss_of(other.model(images), labels) / MICRO_BATCHES
                other.booster.backward(part, other.optimizer)
            expected += part.detach()
        assert torch.equal(loss, expected)
        for each in (run, other):
            make_step(each.optimizer)
        assert run.optimizer.get_grad_norm() == other.optimizer.get_grad_norm() > MAX_NORM
    assert_same_parameters(run.parameters, other.parameters, str(options))


@on(2)
def check_each_as_an_accumulating_loop() -> None:
    replicas, parts = [[[0]], [[1]]], [[[0, 1]]]
    for rank_order, options in (
        (replicas, dict(precision="fp32")),
        (parts, dict(precision="bf16")),
        (parts, dict(precision="fp16", initial_scale=1)),
        (replicas, dict(precision="bf16", zero_stage=1)),
        (replicas, dict(precision="bf16", zero_stage=2)),
    ):
        check_as_an_accumulating_loop(rank_order, options)


def check_results(plan: Plan) -> tuple[list[Any], list[Any]]:
    run = boost(planned(plan), make_optimizer=sgd)
    steps: list[tuple[int, bool, bool, bool]] = [  # samples, training, return_loss, return_outputs
        (8, True, True, True),
        (8, True, False, False),
        (8, False, True, True),
        (5, False, True, True),
        (8, True, True, False),
    ]
    results = []
    for number, (size, training, with_loss, with_outputs) in enumerate(steps):
        run.model.train(training)
        batch = images_and_labels(number, size)
        with torch.set_grad_enabled(training):
            result = run.booster.execute_pipeline(
                iter([batch]), run.model, by_labels, run.optimizer if training else None, with_loss, with_outputs
            )
        assert set(result) == {"loss", "outputs"}
        results.append({key: None if value is None else value.detach() for key, value in result.items()})
        assert all(value is None or not value.requires_grad for value in result.values())
        if training:
            make_step(run.optimizer)
    return results


def test_results_are_those_of_colossalais_pipeline() -> None:
    (ours_,) = run_ranks(1, check_results, ALONE)
    theirs_ = run_ranks(2, check_results, PP2)[-1]
    for own, other in zip(ours_, theirs_, strict=True):
        for key in ("loss", "outputs"):
            assert (own[key] is None) == (other[key] is None), key
            if own[key] is not None:
                torch.testing.assert_close(own[key], other[key], rtol=1e-5, atol=1e-6)


@on(2)
def check_without_a_plan() -> None:
    for sizes in (dict(num_microbatches=4), dict(microbatch_size=2), {}):
        run = boost(ours(tp_size=1, **sizes), make_optimizer=sgd)
        counted: list[int] = []
        run.model.register_forward_pre_hook(lambda _, inputs, counted=counted: counted.append(len(inputs[0])))
        run.booster.execute_pipeline(iter([images_and_labels(0, 8)]), run.model, by_labels, run.optimizer)
        assert counted == ([8] if not sizes else [2] * 4)


class OwnDict(dict[str, Any]): ...


@on(1, ALONE)
@on(2, PP2)
@on(3, UNEQUAL)
def batches_may_be_any_mapping(plan: Plan) -> None:
    run = boost(planned(plan), make_optimizer=sgd)
    images, labels = (part[share(run.plugin)] for part in images_and_labels(0, plan.global_batch))

    def results(batch: Any, criterion: Any) -> list[Any]:
        passes = []
        for training in (True, False):
            with torch.set_grad_enabled(training):
                optimizer = run.optimizer if training else None
                result = run.booster.execute_pipeline(iter([batch]), run.model, criterion, optimizer, True, True)
            passes += [result["loss"], result["outputs"]]
        gradients = [parameter.grad.clone() for parameter in run.model.parameters() if parameter.grad is not None]
        run.optimizer.zero_grad()
        return [*passes, gradients]

    expected = results((images, labels), by_labels)
    for kind in (dict, OwnDict, UserDict, MappingProxyType, BatchEncoding):
        batch = kind(dict(x=images, labels=labels))
        found = results(batch, lambda outputs, inputs: loss_of(outputs, inputs["labels"]))
        torch.testing.assert_close(found, expected, allow_subclasses=False, rtol=0, atol=0, msg=str(kind))
        nested = (images, kind(dict(labels=labels)))
        found = results(nested, lambda outputs, inputs: loss_of(outputs, inputs[1]["labels"]))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=str(kind))


@on(2)
@unmeasured
def uneven_batches_are_trained_with_the_same_loop() -> None:
    plugin = HeteroHybridParallelPlugin(1, 1, precision="fp32", batches=BatchConfig(global_batch_size=7))
    images, labels = images_and_labels(0, 14)
    loader, booster = plugin.prepare_dataloader(TensorDataset(images, labels)), Booster(plugin=plugin)
    alone, model = tiny_vit(), tiny_vit()
    model, optimizer, _, loader, _ = booster.boost(model, sgd(model), loss_of, loader)
    for batch in loader:
        booster.execute_pipeline(iter([batch]), model, by_labels, optimizer)
        make_step(optimizer)
    train_alone(alone, sgd(alone), zip(images.split(7), labels.split(7), strict=True))
    torch.testing.assert_close(model.unwrap().state_dict(), alone.state_dict(), rtol=1e-4, atol=1e-6)
