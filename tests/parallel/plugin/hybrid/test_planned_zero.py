"""A plan in ZeRO stage 1 is run in it, without being told so, and trains like the same plan in stage 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from colossal_hetero.planner.cost.plan import Plan
from tests.parallel.plugin.hybrid.test_planned_run import train_alone, train_planned
from tests.parallel.plugin.unequal.test_unequal_replicas import PLANS, train_replicas
from tests.support.harness import run_ranks
from tests.support.planning import make_plan, planned
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


def train_both(plan: Plan, precision: str) -> tuple[Any, Any]:
    return train(plan, precision), train(in_zero(plan), precision)


@pytest.mark.parametrize("name", EQUAL)
def test_zero_trains_like_stage_0_in_fp32(name: str) -> None:
    plan = EQUAL[name]
    results = run_ranks(plan.world_size, train_both, plan, "fp32")
    if plan.tensor_parallel == 1:
        expected, _ = train_alone(plan.blocks, plan.global_batch)
        assert results[0][1][0][0] == pytest.approx(expected[0], rel=1e-5)
    for one, other in results:
        assert other[0] == pytest.approx(one[0], rel=1e-5)
        for parameter, value in one[1].items():
            # Adam amplifies rounding errors of gradients that are 0.
            torch.testing.assert_close(value, other[1][parameter], rtol=1e-3, atol=2e-4)
        # Two moments; with ZeRO also a copy, and parameters are padded to a multiple of the replicas.
        assert other[2] == pytest.approx(one[2] / 2 * 3 / len(plan.replicas), rel=0.01)


def test_zero_trains_like_stage_0_in_bf16() -> None:
    plan = EQUAL["dp2 pp2"].model_copy(update={"precision": "bf16"})
    for one, other in run_ranks(plan.world_size, train_both, plan, "bf16"):
        assert other[0] == pytest.approx(one[0], rel=0.02)


@pytest.mark.parametrize(("name", "model"), [("1+2", "vit"), ("2+1", "gpt2")])
def test_replicas_that_are_not_alike_are_run_in_zero(name: str, model: str) -> None:
    arguments = (model, "sgd", torch.float32, {}, 1, False)
    usual = run_ranks(3, train_replicas, PLANS[name], *arguments)
    found = run_ranks(3, train_replicas, in_zero(PLANS[name]), *arguments)
    for one, other in zip(usual, found, strict=True):
        assert [loss for loss in other[0] if loss is not None] == pytest.approx(
            [loss for loss in one[0] if loss is not None], rel=1e-5
        )
        for parameter, value in one[2].items():
            torch.testing.assert_close(value, other[2][parameter], rtol=1e-4, atol=1e-5)
