"""One training loop, with ``booster.execute_pipeline``, for every plan: with a pipeline or without one, and interleaved
and zero-bubble plans, whose passes run in the planned order."""

from collections import Counter, UserDict
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from colossalai.booster import Booster
from colossalai.pipeline.schedule.interleaved_pp import InterleavedSchedule
from colossalai.pipeline.schedule.v_schedule import PipelineGraph
from torch.utils.data import TensorDataset
from transformers import BatchEncoding

from colossal_hetero import BatchConfig, HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.common.methods import wrap_method
from colossal_hetero.planner.cost.chunked_price import price_chunks
from colossal_hetero.planner.cost.pass_order import GraphSeconds, Pass, interleaved, zero_bubble_nodes
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.simulate import order_of
from tests.parallel.plugin.hybrid.test_plan_agreement import BLOCKS, cluster, profile
from tests.support import planning, training
from tests.support.checks import on
from tests.support.harness import run_ranks
from tests.support.planning import MICRO_BATCH, MICRO_BATCHES, images_and_labels, make_plan, planned, train_planned
from tests.support.planning import train_alone as train_plan_alone
from tests.support.training import boost, by_labels, loss_of, make_step, ours, sgd, theirs, tiny_vit, train_alone
from tests.support.zero_runs import unmeasured

MAX_NORM = 0.5  # below the norm of the gradients, so that they are clipped
ALONE, DP2, PP2 = make_plan([[[0]]], (2,)), make_plan([[[1]], [[0]]], (2,)), make_plan([[[0], [1]]], (1, 1))
UNEQUAL = planning.unequal_plan(
    make_plan([[[0]]], (2,), MICRO_BATCH, 1), make_plan([[[1], [2]]], (1, 1), MICRO_BATCH, 3)
)


def check_as_an_accumulating_loop(rank_order: list[Any], options: dict[str, Any]) -> None:
    plan = make_plan(rank_order, (2,))
    run = boost(planned(plan, max_norm=MAX_NORM, **options), make_optimizer=sgd)
    other = boost(theirs(tp_size=plan.tensor_parallel, max_norm=MAX_NORM, **options), make_optimizer=sgd)
    for iteration in range(planning.ITERATIONS):
        batch = [part[planning.share(run.plugin)] for part in images_and_labels(iteration, plan.global_batch)]
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
    training.assert_same_parameters(run.parameters, other.parameters, str(options))


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
    for number, (size, trains, with_loss, with_outputs) in enumerate(steps):
        run.model.train(trains)
        batch = images_and_labels(number, size)
        with torch.set_grad_enabled(trains):
            result = run.booster.execute_pipeline(
                iter([batch]), run.model, by_labels, run.optimizer if trains else None, with_loss, with_outputs
            )
        assert set(result) == {"loss", "outputs"}
        results.append({key: None if value is None else value.detach() for key, value in result.items()})
        assert all(value is None or not value.requires_grad for value in result.values())
        if trains:
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
    images, labels = (part[planning.share(run.plugin)] for part in images_and_labels(0, plan.global_batch))

    def results(batch: Any, criterion: Any) -> list[Any]:
        passes = []
        for trains in (True, False):
            with torch.set_grad_enabled(trains):
                optimizer = run.optimizer if trains else None
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


# Plans with chunks ---------------------------------------------------------------------------------------------------


def recorded(scheduler: Any, chunk_numbers: list[int]) -> list[Pass]:
    """A list to which each pass is appended when Colossal-AI's schedule starts it; ``chunk_numbers``: those of this
    stage's chunks in the order of the model."""
    passes: list[Pass] = []
    counts: Counter[tuple[str, int]] = Counter()

    def watched(name: str, kind: Any, place: Any) -> None:
        def run(step: Any, *args: Any, **kwargs: Any) -> Any:
            chunk = place(*args, **kwargs)
            passes.append(Pass(kind, chunk_numbers[chunk], counts[kind, chunk]))
            counts[kind, chunk] += 1
            return step(*args, **kwargs)

        wrap_method(scheduler, name, run)

    if hasattr(scheduler, "schedule_w"):
        for name, kind in (("schedule_f", "forward"), ("schedule_b", "backward"), ("schedule_w", "weight")):
            watched(name, kind, lambda **kwargs: kwargs["model_chunk_id"])
        return passes
    # A backward pass is not told its chunk: the schedule looks it up just before.
    chunk_of: list[int] = []

    def noted(look_up: Any, number: int, is_forward: bool) -> int:
        chunk = int(look_up(number, is_forward))
        chunk_of[:] = chunk_of if is_forward else [chunk]
        return chunk

    wrap_method(scheduler, "get_model_chunk_id", noted)
    watched("forward_step", "forward", lambda model, chunk, *rest: chunk)
    watched("backward_step", "backward", lambda *args: chunk_of[-1])
    return passes


@on(2)
def plans_with_chunks_train_as_one_process_and_run_their_passes_in_order() -> None:
    topology, (expected, weights) = cluster((1.0, 0.5)), train_plan_alone(BLOCKS, 8)
    for schedule in ("interleaved", "zbv"):
        # Unequal ranks, so that chunks have unequal numbers of blocks.
        wishes = dict(global_batch=8, micro_batches=[2], schedules=(schedule,))
        plan = planning.make_plans(topology, profile(), keep=1, **wishes)[0].plan
        assert len(set(plan.layers_per_chunk)) > 1
        plugin = planned(plan)
        stage = int(plugin.pg_mesh.coordinate(plugin.pp_axis))
        order = order_of(plan, plan.replicas[0])
        numbers = [number for number, other in enumerate(order.stage_of_chunk) if other == stage]
        run = boost(plugin, tiny_vit(depth=plan.blocks), sgd)
        passes = recorded(plugin.scheduler, numbers)
        losses = train_planned(run, 1)
        assert passes == list(order.passes[stage]), plan.schedule
        losses += train_planned(run, len(expected) - 1, first=1)
        assert losses == pytest.approx(expected, rel=1e-5), plan.schedule
        held = {name: value for name, value in run.model.unwrap().state_dict().items() if value is not None}
        ranges = plan.replicas[0].stages[stage].block_ranges
        blocks = {int(name.split(".")[1]) for name in held if name.startswith("blocks.")}
        assert blocks == {block for a, b in ranges for block in range(a, b)}
        torch.testing.assert_close(held, {name: weights[name] for name in held}, rtol=1e-4, atol=1e-6)
        assert plugin.drift is None
        check_evaluation(run, plan, plan.schedule)
        with pytest.raises(ValueError, match=r"num_model_chunks=3 contradicts the plan, which has 2"):
            planned(plan, num_model_chunks=3)
    with pytest.raises(ValueError, match="scheduler_nodes follow from the plan; leave them out"):
        planned(plan, scheduler_nodes=[])
    config = PlanConfig(cluster=topology, profile=profile(), global_batch_size=8, schedules=("zbv", "interleaved"))
    run = boost(planned("auto", planning=config), tiny_vit(depth=BLOCKS), sgd)
    assert run.plugin.plan.schedule in ("zbv", "interleaved")
    assert train_planned(run, 1) == pytest.approx(expected[:1], rel=1e-5)


def check_evaluation(run: Any, plan: Plan, schedule: str) -> None:
    def evaluate(size: int) -> float:
        batch = images_and_labels(0, size)
        with torch.no_grad():
            found = run.booster.execute_pipeline(iter([batch]), run.model, by_labels, return_loss=True)["loss"]
        return training.mean_over_replicas(None if found is None else found.item(), size)

    if schedule == "zbv":
        with pytest.raises(ValueError, match="zero-bubble schedule cannot evaluate"):
            evaluate(plan.global_batch)
        return
    assert evaluate(plan.global_batch // 2) == pytest.approx(evaluate(plan.global_batch // 2))
    with pytest.raises(ValueError, match=r"3 micro-batches .* multiple of 2"):
        evaluate(3 * plan.micro_batch)
    train_planned(run, 1)


@on(4)
def replicas_of_plans_with_chunks_sum_their_gradients() -> None:
    # In one data-parallel group the first replica has the lower rank, in the other group the higher one.
    topology, ranks = cluster((1.0, 0.5, 1.0, 0.5)), [[[1], [2]], [[3], [0]]]
    sizes = dict(chunks=2, micro_batch=1, global_batch=8)
    for schedule, bounds in (("interleaved", (0, 2, 3, 5, 6)), ("zbv", (0, 1, 3, 4, 6))):
        plan = price_chunks(topology, profile(), ranks, schedule=schedule, bounds=bounds, **sizes)
        run = boost(planned(plan), tiny_vit(depth=plan.blocks), sgd)
        assert train_planned(run) == pytest.approx(train_plan_alone(BLOCKS, 8)[0], rel=1e-5), schedule


def run_alone(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Pass]:
    """The passes of Colossal-AI's schedule without other stages: messages and the model's passes do nothing."""
    with patch.object(InterleavedSchedule, "__init__", lambda self: None):
        schedule: Any = InterleavedSchedule()
    is_last = Mock(return_value=stage == stages - 1)
    schedule.stage_manager = SimpleNamespace(stage=stage, num_stages=stages, is_last_stage=is_last)
    schedule.num_model_chunks = chunks
    schedule.num_microbatch, schedule.forward_only, schedule.fp8_communication = micro_batches, False, False
    schedule.overlap_p2p = False
    schedule.load_batch = lambda *args: None
    for name in ("recv_forward", "recv_backward", "send_forward_recv_forward", "send_backward_recv_backward"):
        setattr(schedule, name, lambda *args, **kwargs: (None, []))
    schedule.send_forward = schedule.send_backward = lambda *args: []
    schedule.forward_step = schedule.backward_step = lambda *args: None
    passes = recorded(schedule, [stage + chunk * stages for chunk in range(chunks)])
    schedule.run_forward_backward(None, iter(()), None)
    return passes


@on(1)
def orders_of_passes_are_those_of_colossalai() -> None:
    for stages, chunks, multiple in ((2, 2, 1), (2, 3, 2), (3, 2, 1), (4, 2, 2), (4, 3, 3), (5, 4, 1)):
        order = interleaved(stages, chunks, stages * multiple)
        for stage in range(stages):
            found = run_alone(stage, stages, chunks, stages * multiple)
            assert found == list(order.passes[stage]), (stages, chunks, multiple, stage)
    seconds = GraphSeconds(forward=1.0, input_gradient=1.5, weight_gradient=0.5, transfer=0.2)
    for stages, multiple in ((2, 2), (3, 1), (4, 3)):
        graph = PipelineGraph(stages, stages * multiple, 1.0, 1.5, 0.5, 0.2, 1, 0, -1)
        assert str(graph.get_v_schedule()) == str(zero_bubble_nodes(stages, stages * multiple, seconds))
