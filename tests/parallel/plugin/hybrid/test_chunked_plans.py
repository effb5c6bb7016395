"""Interleaved and zero-bubble plans: training equals that of one process, and passes run in the planned order."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from colossalai.pipeline.schedule.interleaved_pp import InterleavedSchedule
from colossalai.pipeline.schedule.v_schedule import PipelineGraph
from torch import Tensor

from colossal_hetero import PlanConfig
from colossal_hetero.planner.cost.chunked_price import price_chunks
from colossal_hetero.planner.cost.pass_order import GraphSeconds, Pass, interleaved, zero_bubble_nodes
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.simulate import order_of
from tests.parallel.plugin.hybrid.test_plan_agreement import BLOCKS, cluster, profile
from tests.parallel.plugin.hybrid.test_planned_run import (
    images_and_labels,
    train_alone,
    train_planned,
)
from tests.support.harness import run_ranks
from tests.support.planning import make_plans, planned
from tests.support.training import boost, by_labels, mean_over_replicas, sgd, tiny_vit


def recorded(scheduler: Any, chunk_numbers: list[int]) -> list[Pass]:
    """A list to which each pass is appended when Colossal-AI's schedule starts it.

    Args:
        scheduler: of an iteration to come.
        chunk_numbers: numbers of this stage's chunks in the order of the model.
    """
    passes: list[Pass] = []
    counts: dict[tuple[str, int], int] = {}

    def record(kind: Any, place: int) -> None:
        number = counts.get((kind, place), 0)
        counts[kind, place] = number + 1
        passes.append(Pass(kind, chunk_numbers[place], number))

    def watched(name: str, kind: str, place: Any) -> None:
        step = getattr(scheduler, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            record(kind, place(*args, **kwargs))
            return step(*args, **kwargs)

        setattr(scheduler, name, run)

    if hasattr(scheduler, "schedule_w"):
        for name, kind in (("schedule_f", "forward"), ("schedule_b", "backward"), ("schedule_w", "weight")):
            watched(name, kind, lambda **kwargs: kwargs["model_chunk_id"])
        return passes
    # A backward pass is not told its chunk: the schedule looks it up just before.
    chunk_of: list[int] = []
    look_up = scheduler.get_model_chunk_id

    def noted(number: int, is_forward: bool) -> int:
        chunk = int(look_up(number, is_forward))
        if not is_forward:
            chunk_of.append(chunk)
        return chunk

    scheduler.get_model_chunk_id = noted
    watched("forward_step", "forward", lambda model, chunk, *rest: chunk)
    watched("backward_step", "backward", lambda *args: chunk_of[-1])
    return passes


def check_run(plans: list[Plan], expected: list[float], weights: dict[str, Tensor]) -> None:
    for plan in plans:
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
        for name, value in held.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-6)
        assert plugin.drift is None
        check_evaluation(run, plan, plan.schedule)
    planning = PlanConfig(
        cluster=cluster((1.0, 0.5)), profile=profile(), global_batch_size=8, schedules=("zbv", "interleaved")
    )
    run = boost(planned("auto", planning=planning), tiny_vit(depth=BLOCKS), sgd)
    assert run.plugin.plan.schedule in ("zbv", "interleaved")
    assert train_planned(run, 1) == pytest.approx(expected[:1], rel=1e-5)
    with pytest.raises(ValueError, match="scheduler_nodes follow from the plan; leave them out"):
        planned(plans[-1], scheduler_nodes=[])
    with pytest.raises(ValueError, match=r"num_model_chunks=3 contradicts the plan, which has 2"):
        planned(plans[0], num_model_chunks=3)


def check_evaluation(run: Any, plan: Plan, schedule: str) -> None:
    """A batch is evaluated as in one process, or refused in words, and training goes on."""

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


def test_plans_with_chunks_train_as_one_process_and_run_their_passes_in_order() -> None:
    # Unequal ranks, so that chunks have unequal numbers of blocks.
    plans = [
        make_plans(cluster((1.0, 0.5)), profile(), global_batch=8, micro_batches=[2], schedules=(schedule,), keep=1)[
            0
        ].plan
        for schedule in ("interleaved", "zbv")
    ]
    assert all(len(set(plan.layers_per_chunk)) > 1 for plan in plans)
    run_ranks(2, check_run, plans, *train_alone(BLOCKS, 8, 3))


def check_replicas(plans: list[Plan], expected: list[float]) -> None:
    for plan in plans:
        run = boost(planned(plan), tiny_vit(depth=plan.blocks), sgd)
        assert train_planned(run, len(expected)) == pytest.approx(expected, rel=1e-5), plan.schedule


def test_replicas_of_plans_with_chunks_sum_their_gradients() -> None:
    # In one data-parallel group the first replica has the lower rank, in the other group the higher one.
    ranks = [[[1], [2]], [[3], [0]]]
    plans = [
        price_chunks(
            cluster((1.0, 0.5, 1.0, 0.5)),
            profile(),
            ranks,
            schedule=schedule,
            chunks=2,
            micro_batch=1,
            global_batch=8,
            bounds=bounds,
        )
        for schedule, bounds in (("interleaved", (0, 2, 3, 5, 6)), ("zbv", (0, 1, 3, 4, 6)))
    ]
    run_ranks(4, check_replicas, plans, train_alone(BLOCKS, 8, 3)[0])


# More stages than a quick test can run ----------------------------------------------------------------------------


class Stages:
    """What an interleaved schedule asks its stage manager."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.num_stages = stage, stages

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        return self.stage == self.num_stages - 1


def run_alone(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Pass]:
    """The passes of Colossal-AI's schedule without other stages: messages and the model's passes do nothing."""
    with patch.object(InterleavedSchedule, "__init__", lambda self: None):
        schedule: Any = InterleavedSchedule()
    schedule.stage_manager, schedule.num_model_chunks = Stages(stage, stages), chunks
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


def check_orders() -> None:
    for stages, chunks, multiple in ((2, 2, 1), (2, 3, 2), (3, 2, 1), (4, 2, 2), (4, 3, 3), (5, 4, 1)):
        order = interleaved(stages, chunks, stages * multiple)
        for stage in range(stages):
            found = run_alone(stage, stages, chunks, stages * multiple)
            assert found == list(order.passes[stage]), (stages, chunks, multiple, stage)
    seconds = GraphSeconds(forward=1.0, input_gradient=1.5, weight_gradient=0.5, transfer=0.2)
    for stages, multiple in ((2, 2), (3, 1), (4, 3)):
        graph = PipelineGraph(stages, stages * multiple, 1.0, 1.5, 0.5, 0.2, 1, 0, -1)
        assert str(graph.get_v_schedule()) == str(zero_bubble_nodes(stages, stages * multiple, seconds))


def test_orders_of_passes_are_those_of_colossalai() -> None:
    run_ranks(1, check_orders)
