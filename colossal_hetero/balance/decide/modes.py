"""How much each rank computes: from measured times and costs to a plan, by the rule of the mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..config import BalanceConfig
from .costs import Costs, predicted_seconds
from .optimum import optimal_plan
from .plan import BalancePlan, RankTimes
from .ratios import resize_ratios
from .semi import semi_plan

__all__ = ["decide"]

STEPS = 2**20
"""In modes that migrate, shares are multiples of 1/STEPS. So processors that round differently get the same shares, and
what is given equals what is taken to the last bit."""


def decide(times: Sequence[RankTimes], costs: Costs, config: BalanceConfig, current: BalancePlan) -> BalancePlan:
    """The plan for the group's equal-work ``times``; it is ``current`` if a change would gain too little.

    A rank's work is reduced only if it is slower than the fastest rank (in mode ``resize``: than T_ref) by more than
    the margin. A plan that reduces the work of a rank that is no longer slow is dropped. Otherwise the plan is replaced
    only by one that gains enough. Because of that, and because times are not exchanged below a threshold, noise does
    not change the plan.
    """
    if config.mode == "off":
        return BalancePlan.idle(len(times))
    if config.mode == "resize":
        return _decide_resize(times, config, current)
    if config.mode == "migrate":
        # This mode migrates whatever sending costs.
        costs = replace(costs, migrate_fixed_seconds=0.0, migrate_seconds_per_share=0.0)
        wanted = optimal_plan(times, costs, 0.0, config.margin)
    elif config.mode == "semi":
        wanted = semi_plan(times, costs, config.max_resize, config.margin)
    else:
        wanted = optimal_plan(times, costs, config.max_resize, config.margin)
    return _worth_changing(times, costs, config, current, _in_steps(wanted))


def _decide_resize(times: Sequence[RankTimes], config: BalanceConfig, current: BalancePlan) -> BalancePlan:
    """Slow ranks prune down to T_ref (SEMI, Sec. III); a ratio is kept until the rank's time changes by the margin."""
    work = np.array([rank.work_seconds for rank in times])
    matmul = np.array([rank.matmul_seconds for rank in times])
    now = np.array(current.resize)
    reference = float(work.min() if config.reference == "minimum" else work.mean())
    slow = work > (1 + config.margin) * reference
    if config.resize_ratio == "auto":
        # Pruning γ saves γ·M and costs the overhead, which is added to the excess time of Eq. 1.
        wanted = resize_ratios(work + config.resize_overhead * matmul, matmul, reference, config.max_resize)
    else:
        wanted = np.full(len(times), float(config.resize_ratio))
    wanted = np.where(slow, wanted, 0.0)
    close_enough = (now > 0) & (wanted > 0) & (np.abs(wanted - now) * matmul <= config.margin * reference)
    return BalancePlan.resizing(tuple(float(ratio) for ratio in np.where(close_enough, now, wanted)))


def _worth_changing(
    times: Sequence[RankTimes], costs: Costs, config: BalanceConfig, current: BalancePlan, wanted: BalancePlan
) -> BalancePlan:
    """``wanted`` if it gains enough over ``current``; ``current`` is dropped if it relieves a rank that is not slow."""
    slow_from = (1 + config.margin) * min(time.work_seconds for time in times)
    idle = BalancePlan.idle(len(times))
    relief = zip(times, current.resize, current.migrate, strict=True)
    if any(resize + migrate > 0 and time.work_seconds <= slow_from for time, resize, migrate in relief):
        current = idle
    if wanted == current:
        return wanted
    before, after = (predicted_seconds(times, costs, plan) for plan in (current, wanted))
    # To start balancing, half of the gain that is needed to replace a balancing plan is enough.
    if before - after > (config.margin / 2 if current == idle else config.margin) * before:
        return wanted
    if current != idle:
        return current
    return BalancePlan.idle(len(times), f"balancing would gain too little: {after:.3g} s with, {before:.3g} s without")


def _in_steps(plan: BalancePlan) -> BalancePlan:
    """``plan`` with its shares rounded to multiples of 1/STEPS; as much is taken as is given."""
    given = np.floor(np.array(plan.migrate) * STEPS + 0.5)
    taken = np.cumsum(plan.receive)
    if taken[-1] > 0:
        taken = np.floor(taken * (given.sum() / taken[-1]) + 0.5)
    resized = np.floor(np.array(plan.resize) * STEPS + 0.5)
    resize, migrate, receive = (
        tuple((steps / STEPS).tolist()) for steps in (resized, given, np.diff(taken, prepend=0.0))
    )
    return BalancePlan(resize, migrate, receive, plan.note)
