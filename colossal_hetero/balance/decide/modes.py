"""Who does how much: from measured times and costs to a plan, by the rule of the mode."""

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
"""Shares of modes that migrate are whole multiples of 1/STEPS: then processors that round differently agree on them,
and what is given and taken is the same to the last bit."""


def decide(times: Sequence[RankTimes], costs: Costs, config: BalanceConfig, current: BalancePlan) -> BalancePlan:
    """The plan for the group's equal-work ``times``, which keeps to ``current`` where a change would not pay.

    A rank is told to do less only if it is slower than the fastest (in mode ``resize``, than T_ref) by more than the
    margin. A plan that relieves a rank which no longer is slow is given up. Else it is changed only for one that gains
    enough. Together with the threshold below which times are not even exchanged, that keeps noise from moving the plan.
    """
    if config.mode == "off":
        return BalancePlan.idle(len(times))
    if config.mode == "resize":
        return _decide_resize(times, config, current)
    if config.mode == "migrate":
        # Whoever asks for migration gets it, whatever it costs to send.
        costs = replace(costs, migrate_fixed_seconds=0.0, migrate_seconds_per_share=0.0)
        wanted = optimal_plan(times, costs, 0.0, config.margin)
    elif config.mode == "semi":
        wanted = semi_plan(times, costs, config.max_resize, config.margin)
    else:
        wanted = optimal_plan(times, costs, config.max_resize, config.margin)
    return _worth_changing(times, costs, config, current, _in_steps(wanted))


def _decide_resize(times: Sequence[RankTimes], config: BalanceConfig, current: BalancePlan) -> BalancePlan:
    """Slow ranks prune down to T_ref (SEMI, Sec. III); each keeps its ratio until its time moves by the margin."""
    work = np.array([rank.work_seconds for rank in times])
    matmul = np.array([rank.matmul_seconds for rank in times])
    now = np.array(current.resize)
    reference = float(work.min() if config.reference == "minimum" else work.mean())
    slow = work > (1 + config.margin) * reference
    if config.resize_ratio == "auto":
        # Pruning γ saves γ·M and costs the overhead: for Eq. 1 the rank has that much more to lose.
        wanted = resize_ratios(work + config.resize_overhead * matmul, matmul, reference, config.max_resize)
    else:
        wanted = np.full(len(times), float(config.resize_ratio))
    wanted = np.where(slow, wanted, 0.0)
    close_enough = (now > 0) & (wanted > 0) & (np.abs(wanted - now) * matmul <= config.margin * reference)
    return BalancePlan.resizing(tuple(float(ratio) for ratio in np.where(close_enough, now, wanted)))


def _worth_changing(
    times: Sequence[RankTimes], costs: Costs, config: BalanceConfig, current: BalancePlan, wanted: BalancePlan
) -> BalancePlan:
    """``wanted`` if it gains enough over ``current``; that one is out if it relieves a rank that is not slow."""
    slow_from = (1 + config.margin) * min(time.work_seconds for time in times)
    idle = BalancePlan.idle(len(times))
    relief = zip(times, current.resize, current.migrate, strict=True)
    if any(resize + migrate > 0 and time.work_seconds <= slow_from for time, resize, migrate in relief):
        current = idle
    if wanted == current:
        return wanted
    before, after = (predicted_seconds(times, costs, plan) for plan in (current, wanted))
    # To start balancing, half the gain is enough of that which a plan that balances already is changed for.
    if before - after > (config.margin / 2 if current == idle else config.margin) * before:
        return wanted
    if current != idle:
        return current
    return BalancePlan.idle(len(times), f"balancing would gain too little: {after:.3g} s with, {before:.3g} s without")


def _in_steps(plan: BalancePlan) -> BalancePlan:
    """``plan`` with its shares rounded to :data:`STEPS`; as much is taken as is given."""
    given = np.floor(np.array(plan.migrate) * STEPS + 0.5)
    taken = np.cumsum(plan.receive)
    if taken[-1] > 0:
        taken = np.floor(taken * (given.sum() / taken[-1]) + 0.5)
    resized = np.floor(np.array(plan.resize) * STEPS + 0.5)
    resize, migrate, receive = (
        tuple((steps / STEPS).tolist()) for steps in (resized, given, np.diff(taken, prepend=0.0))
    )
    return BalancePlan(resize, migrate, receive, plan.note)
