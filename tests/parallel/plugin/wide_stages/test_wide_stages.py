"""Stages of several groups train like one process on the same global batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from colossal_hetero.planner.plans.plan import Plan
from tests.parallel.plugin.unequal.test_unequal_replicas import check
from tests.support.planning import make_plan, unequal_plan
from tests.support.random_examples import IS_THOROUGH


def wide(ranks: list[list[int]], layers: list[int], widths: list[int], micro_batch: int, micro_batches: int) -> Plan:
    """A plan of one replica."""
    return make_plan([ranks], layers, micro_batch, micro_batches, widths=widths)


PLANS: dict[str, Plan] = {
    "2-1": wide([[0, 1], [2]], [1, 3], [2, 1], 2, 3),
    "1-2": wide([[1], [2, 0]], [3, 1], [1, 2], 2, 2),
    "2": wide([[0, 1]], [4], [2], 4, 2),
    "3-1": wide([[2, 3, 1], [0]], [3, 1], [3, 1], 6, 2),
    "2-3": wide([[0, 1], [2, 4, 3]], [2, 2], [2, 3], 6, 2),
    "1-2-1": wide([[3], [1, 2], [0]], [1, 2, 1], [1, 2, 1], 4, 4),
    "2-2": wide([[0, 1], [2, 3]], [1, 3], [2, 2], 2, 3),
    "tp2 1-2": make_plan([[[4, 5], [2, 3, 1, 0]]], [2, 2], 4, 2, widths=[1, 2]),
    "2-1 twice": make_plan([[[0, 1], [2]], [[3, 4], [5]]], [3, 1], 2, 2, widths=[2, 1]),
    "2-1, 1": unequal_plan(wide([[0, 1], [2]], [3, 1], [2, 1], 2, 3), wide([[3]], [4], [1], 2, 2)),
    "1, 2": unequal_plan(wide([[1]], [4], [1], 4, 1), wide([[0, 2]], [4], [2], 4, 2)),
}


@pytest.mark.parametrize(
    ("plan", "model"),
    [("2-1", "gpt2"), ("1-2", "vit"), ("2", "bert"), ("2-3", "gpt2"), ("2-1, 1", "llama"), ("1, 2", "vit")],
)
def test_wide_stages_train_like_one_process(plan: str, model: str) -> None:
    check(PLANS[plan], model, max_norm=0.5)


@pytest.mark.skipif(not IS_THOROUGH, reason="other plans are checked by every run")
@pytest.mark.parametrize(
    ("plan", "model"), [("1-2", "gpt2"), ("3-1", "bert"), ("1-2-1", "llama"), ("2-2", "gpt2"), ("2-1 twice", "vit")]
)
def test_more_wide_stages_train_like_one_process(plan: str, model: str) -> None:
    check(PLANS[plan], model, max_norm=0.5)


def test_tensor_parallel_groups_of_a_wide_stage_train_like_one_process() -> None:
    check(PLANS["tp2 1-2"], "llama", dtype=torch.float32, max_norm=0.5)


@pytest.mark.parametrize(("plan", "model"), [("2-1", "gpt2"), ("2-1, 1", "vit")])
def test_zero_divides_the_state_among_all_groups(plan: str, model: str) -> None:
    check(PLANS[plan], model, dtype=torch.float32, max_norm=0.5, zero_stage=1)


@pytest.mark.parametrize(
    "options", [dict(no_sync=False), dict(no_sync=True), dict(no_sync=True, zero_stage=1, dtype=torch.float32)]
)
def test_gradients_of_several_global_batches_accumulate(options: dict[str, Any]) -> None:
    check(PLANS["1-2"], "gpt2", accumulation=2, **options)


def test_messages_may_tell_their_shapes_every_time() -> None:
    check(PLANS["2-1"], "vit", enable_metadata_cache=False)
