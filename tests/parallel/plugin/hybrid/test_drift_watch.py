"""At the end of an epoch, a planned run reports stages whose times differ from the plan."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch.utils.data import TensorDataset

from colossal_hetero import PlanConfig
from colossal_hetero.common import ranks
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.plugin.hybrid.drift import PassSeconds, StageClock
from tests.parallel.plugin.hybrid.test_plan_agreement import profile
from tests.parallel.plugin.hybrid.test_planned_run import MICRO_BATCH, MICRO_BATCHES, images_and_labels, train_planned
from tests.support.harness import run_ranks
from tests.support.planning import SECONDS, make_plan, planned
from tests.support.training import Trained, by_labels, loss_of, sgd, tiny_vit


def check_drift(
    plan: Plan, times: dict[int, PassSeconds] | None, slow: int | None, planning: PlanConfig | None = None
) -> tuple[list[str], Any]:
    """Train two epochs of three iterations. Returns the printed lines and the second report."""
    printed: list[str] = []
    clock = nullcontext() if times is None else patch.object(StageClock, "read", lambda _: times[dist.get_rank()])
    model = tiny_vit(depth=plan.blocks)
    if dist.get_rank() == slow:
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    with clock, patch.object(ranks, "print_words", printed.append):
        plugin = planned(plan, planning=planning)
        loader = plugin.prepare_dataloader(TensorDataset(torch.zeros(3 * MICRO_BATCH * MICRO_BATCHES)))
        optimizer = sgd(model)
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(model, optimizer, loss_of, loader)
        run = Trained([], model, optimizer, booster, plugin)
        assert plugin.drift is None
        train_planned(run, 2)
        assert plugin.drift is None, "a report was made before the end of the epoch"
        train_planned(run, 1)
        first = plugin.drift
        with torch.no_grad():
            loss = booster.execute_pipeline(iter([images_and_labels(0, 4)]), model, by_labels, None, True)["loss"]
        assert (loss is not None) == plugin.stage_manager.is_last_stage()
        assert plugin.drift is first
        train_planned(run, 3)
        second = plugin.drift
        assert second is not first
        # For the next model, the length of an epoch is that of its own loader.
        model = tiny_vit(depth=plan.blocks)
        loader = plugin.prepare_dataloader(TensorDataset(torch.zeros(MICRO_BATCH * MICRO_BATCHES)))
        model, optimizer, *_ = booster.boost(model, sgd(model), loss_of, loader)
        train_planned(Trained([], model, optimizer, booster, plugin), 1)
        assert plugin.drift is not second
    return printed[:2], second


def test_reports_a_stage_that_drifts() -> None:
    plan = make_plan([[[1], [0]]], (3, 3), MICRO_BATCH, MICRO_BATCHES)
    as_planned = PassSeconds(SECONDS, 2 * SECONDS)
    planning = PlanConfig(profile=profile())
    results = run_ranks(2, check_drift, plan, {0: PassSeconds(3 * SECONDS, 6 * SECONDS), 1: as_planned}, None, planning)
    (printed, report), (other_printed, other_report) = results
    assert report == other_report and other_printed == []
    # Nothing is printed after the second epoch, because nothing changed.
    assert len(printed) == 1 and printed[0].startswith("epoch 1: stage times differ from the plan\nstage 1 (cpu, rank")
    assert "best split now: 5+1 layers" in printed[0]
    assert report.proposal.layers_per_stage == (5, 1) and report.proposal.basis == "profile"


def test_measures_a_stage_that_is_slow() -> None:
    """The plan expects forward passes of 10 ms in both stages. In one stage they take at least 150 ms."""
    plan = make_plan([[[1], [0]]], (3, 3), MICRO_BATCH, MICRO_BATCHES, forward_seconds=[0.01, 0.01])
    for _, report in run_ranks(2, check_drift, plan, None, 0):
        slow = next(stage for stage in report.drifted if stage.ranks == (0,))
        assert slow.stage == 1 and slow.measured.forward_seconds >= 0.15
        assert report.proposal.layers_per_stage[1] < 3
