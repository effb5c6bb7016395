"""A plan in ZeRO stage 1 is run in it, without being told so, and trains like the same plan in stage 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from colossal_hetero.planner.cost.plan import Plan
from tests.parallel.plugin.hybrid.test_planned_run import train_alone, train_planned
from tests.support.harness import run_ranks
from tests.support.planning import make_plan, planned
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import adamw, boost, tiny_vit

EQUAL: dict[str, Plan] = {
    "dp2": make_plan([[[0]], [[1]]], [4], 2, 2),
    "dp2 pp2": make_plan([[[3], [0]], [[1], [2]]], [3, 1], 2, 3),
    "dp3": make_plan([[[0]], [[1]], [[2]]], [4], 2, 1),
    "dp2 tp2": make_plan([[[0, 1]], [[2, 3]]], [4], 2, 2),
}


def in_zero(plan: Plan) -> Plan:
    return plan.model_copy(update={"zero_stage": 1})


def train(plan: Plan, precision: str) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, parameters, and how many elements this rank keeps beside them: moments, and copies of parameters."""
    run = boost(planned(plan, precision=precision), tiny_vit(depth=plan.blocks), adamw)
    assert run.plugin.zero_stage == plan.zero_stage and run.plugin.precision == precision
    losses = train_planned(run)
    optimizer, own = run.optimizer.optim, {each.data_ptr() for each in run.model.unwrap().parameters()}
    moments = [each for state in optimizer.state.values() for each in state.values() if each.dim()]
    copies = [each for group in optimizer.param_groups for each in group["params"] if each.data_ptr() not in own]
    return losses, run.parameters, sum(each.numel() for each in (*moments, *copies))


def train_both(plans: list[Plan]) -> list[tuple[Any, Any]]:
    """The results in stage 0 and in ZeRO, by plan."""
    return [(train(plan, plan.precision), train(in_zero(plan), plan.precision)) for plan in plans]


@pytest.mark.parametrize("ranks", [2, 3, 4] if IS_THOROUGH else [3, 4])
def test_zero_trains_like_stage_0(ranks: int) -> None:
    half = EQUAL["dp2 pp2"].model_copy(update={"precision": "bf16"})
    plans = [plan for plan in (*EQUAL.values(), half) if plan.world_size == ranks]
    found = run_ranks(ranks, train_both, plans, timeout_seconds=280)
    for plan, results in zip(plans, zip(*found, strict=True), strict=True):
        if plan.tensor_parallel == 1 and plan != half:
            expected, _ = train_alone(plan.blocks, plan.global_batch)
            assert results[0][1][0][0] == pytest.approx(expected[0], rel=1e-5)
        for one, other in results:
            assert other[0] == pytest.approx(one[0], rel=0.02 if plan == half else 1e-5)
            for parameter, value in () if plan == half else one[1].items():
                # Adam amplifies rounding errors of gradients that are 0.
                torch.testing.assert_close(value, other[1][parameter], rtol=1e-3, atol=2e-4)
            # Two moments; with ZeRO also a copy, and parameters are padded to a multiple of the replicas.
            if plan != half:
                assert other[2] == pytest.approx(one[2] / 2 * 3 / len(plan.replicas), rel=0.01)
