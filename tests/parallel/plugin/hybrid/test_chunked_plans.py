"""Interleaved and zero-bubble plans: training equals that of one process, and passes run in the planned order."""

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from colossalai.pipeline.schedule.interleaved_pp import InterleavedSchedule
from colossalai.pipeline.schedule.v_schedule import PipelineGraph

from colossal_hetero import PlanConfig
from colossal_hetero.common.methods import wrap_method
from colossal_hetero.planner.cost.chunked_price import price_chunks
from colossal_hetero.planner.cost.pass_order import GraphSeconds, Pass, interleaved, zero_bubble_nodes
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.simulate import order_of
from tests.parallel.plugin.hybrid.test_plan_agreement import BLOCKS, cluster, profile
from tests.support.checks import on
from tests.support.planned_runs import images_and_labels, train_alone, train_planned
from tests.support.planning import make_plans, planned
from tests.support.training import boost, by_labels, mean_over_replicas, sgd, tiny_vit


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
    topology, (expected, weights) = cluster((1.0, 0.5)), train_alone(BLOCKS, 8)
    for schedule in ("interleaved", "zbv"):
        # Unequal ranks, so that chunks have unequal numbers of blocks.
        wishes = dict(global_batch=8, micro_batches=[2], schedules=(schedule,))
        plan = make_plans(topology, profile(), keep=1, **wishes)[0].plan
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
    planning = PlanConfig(cluster=topology, profile=profile(), global_batch_size=8, schedules=("zbv", "interleaved"))
    run = boost(planned("auto", planning=planning), tiny_vit(depth=BLOCKS), sgd)
    assert run.plugin.plan.schedule in ("zbv", "interleaved")
    assert train_planned(run, 1) == pytest.approx(expected[:1], rel=1e-5)


def check_evaluation(run: Any, plan: Plan, schedule: str) -> None:
    def evaluate(size: int) -> float:
        batch = images_and_labels(0, size)
        with torch.no_grad():
            found = run.booster.execute_pipeline(iter([batch]), run.model, by_labels, return_loss=True)["loss"]
        return mean_over_replicas(None if found is None else found.item(), size)

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
        assert train_planned(run) == pytest.approx(train_alone(BLOCKS, 8)[0], rel=1e-5), schedule


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
