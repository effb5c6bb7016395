"""Amount that each rank computes: from measured times and costs to a plan, by the rule of the mode."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum

import numpy as np

from .config import BalanceConfig
from .optimum import optimal_plan, semi_plan
from .plan import BalancePlan, Costs, Counts, RankTimes, predicted_seconds
from .ratios import KindProblem, Line, fastest_counts, resize_ratios

# Division ------------------------------------------------------------------------------------------------------------

MIN_GAIN = 0.005  # minimum gain for which a division is changed, as a share of the time of the blocks


def iteration_seconds(problems: Sequence[KindProblem], counts: Counts, fixed_seconds: float = 0.0) -> float:
    """Seconds of all blocks in an iteration: a sum over blocks of the time of the slowest rank, because ranks wait for
    each other at the end of each block. ``fixed_seconds`` is what moving anything at all adds."""
    moves = any(problem.moved(of_kind) for problem, of_kind in zip(problems, counts, strict=True))
    blocks = fsum(problem.seconds(of_kind) for problem, of_kind in zip(problems, counts, strict=True))
    return blocks + (fixed_seconds if moves else 0.0)


def decide_counts(
    problems: Sequence[KindProblem], current: Counts, uncertainty: float, fixed_seconds: float = 0.0
) -> tuple[Counts, str]:
    """The counts from now on, and why. They stay ``current`` unless others save more than ``uncertainty``, a share of
    the blocks' time below which a difference may be chance; moving nothing is preferred to saving less than half."""
    nothing, wanted = tuple(problem.nothing for problem in problems), tuple(map(fastest_counts, problems))
    now, best, without = (iteration_seconds(problems, counts, fixed_seconds) for counts in (current, wanted, nothing))
    required = max(uncertainty, MIN_GAIN)
    if without - best <= required / 2 * without:
        wanted, best = nothing, without
    compared = f"{best:.3g} s in blocks with, {without:.3g} s without"
    if now - best <= required * now:
        if current == nothing:
            return nothing, f"balancing would gain too little: {compared}"
        return current, f"migration pays: {compared}"
    if wanted == nothing:
        return nothing, f"migration cannot pay: {compared}"
    return wanted, f"migration pays: {compared}"


STEPS = 2**20
"""Shares are multiples of 1/STEPS in modes that migrate. So processors that round differently get the same shares, and
what is given equals what is taken to the last bit."""


@dataclass(frozen=True)
class LayerKind:
    """Layers or blocks of a rank that are divided in the same way."""

    units: int | None
    """Units of each block; None for layers that are divided by their columns, whose full share counts as 1."""
    grain: int
    weight: float  # the kind's share of the cost of all products that can be divided
    moves: bool = True

    @property
    def full(self) -> float:
        return 1.0 if self.units is None else float(self.units)


@dataclass(frozen=True)
class UnitWork:
    """The work of blocks by units, as :class:`RankTimes` are for shares of all work."""

    kinds: Sequence[LayerKind]
    lines: Sequence[Sequence[Line]]  # the work of each rank, by kind
    scale: float = 1.0  # seconds of the present iterations for one second of ``lines``


def decide(
    times: Sequence[RankTimes],
    costs: Costs,
    config: BalanceConfig,
    current: BalancePlan,
    uncertainty: float | None = None,
    units: UnitWork | None = None,
    max_received: float = math.inf,
) -> BalancePlan:
    """The plan for the group's equal-work ``times``; it is ``current`` if a change would gain too little. The plan has
    whole units of each kind of blocks if nothing may be pruned and ``units`` are given, otherwise shares of all work.

    A rank's work is reduced by shares only if it is slower than the fastest rank (in mode ``resize``: than T_ref) by
    more than the threshold. A plan that reduces the work of a rank that is no longer slow is dropped. The ``current``
    one is replaced only if the ``uncertainty`` of the times, a share of them (None: the threshold), does not explain
    the difference. ``max_received`` is the largest share of its own work that a receiver has memory for."""
    if config.mode == "off":
        return BalancePlan.idle(len(times))
    if units is not None and config.is_exact and any(kind.units is not None for kind in units.kinds):
        limit = config.threshold if uncertainty is None else uncertainty
        return _decide_units(units, costs, config, current, limit, max_received)
    # The difference of two times is less certain than each of them.
    difference = config.threshold if uncertainty is None else math.sqrt(2.0) * uncertainty
    margin = max(config.threshold, difference)
    most = config.largest_resize
    if config.mode == "resize":
        return _decide_resize(times, config, current, margin, max(difference, MIN_GAIN))
    if config.mode == "migrate":
        # This mode migrates whatever sending costs.
        costs = replace(costs, migrate_fixed_seconds=0.0, migrate_seconds_per_share=0.0)
    plan_of = semi_plan if config.mode == "semi" else optimal_plan
    wanted = _in_steps(plan_of(times, costs, most, margin), most)
    return _worth_changing(times, costs, config, current, wanted).limited(max_received)


def _decide_units(
    work: UnitWork, costs: Costs, config: BalanceConfig, current: BalancePlan, uncertainty: float, max_received: float
) -> BalancePlan:
    """The fastest division of the whole units of each kind of blocks, which prunes nothing. Every block ends at a
    collective, so kinds are independent. Layers that are divided by columns get the resulting shares of all work."""
    ranks = len(current.resize)
    # Mode "migrate" migrates whatever sending costs.
    sends = 0.0 if config.mode == "migrate" else costs.communication_scale / work.scale
    blocks = [(number, kind) for number, kind in enumerate(work.kinds) if kind.units is not None]
    problems = []
    for number, kind in blocks:
        assert kind.units is not None
        most = min(max_received, ranks - 1.0) if kind.moves else 0.0
        problems.append(
            KindProblem(
                *(kind.units, kind.grain, int(most * kind.units), work.lines[number]),
                sends * costs.migrate_seconds_per_share * kind.weight / kind.units,
            )
        )
    nothing = tuple(problem.nothing for problem in problems)
    now = tuple(
        of_kind if max(of_kind) <= problem.units + problem.max_taken else problem.nothing
        for of_kind, problem in zip(current.units or nothing, problems, strict=True)
    )
    counts, note = decide_counts(problems, now, uncertainty, sends * costs.migrate_fixed_seconds)
    if math.isfinite(max_received):
        note = f"receivers have memory for no more than {max_received:.0%} of their own work; {note}"
    if counts == now:
        return replace(current, note=note) if current.units else BalancePlan.idle(ranks, note)
    weight = math.fsum(kind.weight for _, kind in blocks)
    more = [
        math.fsum(
            kind.weight / weight * (of_kind[rank] / problem.units - 1.0)
            for (_, kind), problem, of_kind in zip(blocks, problems, counts, strict=True)
        )
        for rank in range(ranks)
    ]
    if counts == nothing:
        return BalancePlan.idle(ranks, note)
    given, taken = tuple(max(0.0, -share) for share in more), tuple(max(0.0, share) for share in more)
    shares = BalancePlan((0.0,) * ranks, given, taken, note)
    return replace(_in_steps(shares, 0.0), units=counts)


def _decide_resize(
    times: Sequence[RankTimes], config: BalanceConfig, current: BalancePlan, margin: float, precision: float
) -> BalancePlan:
    """Prune slow ranks down to T_ref (SEMI, Sec. III). A rank starts if it is slower by more than ``margin``, and keeps
    its ratio while another one would change its time by at most ``precision``·T_ref."""
    work = np.array([rank.work_seconds for rank in times])
    matmul = np.array([rank.matmul_seconds for rank in times])
    now = np.array(current.resize)
    reference = float(work.min() if config.rules.reference == "minimum" else work.mean())
    slow = work > (1 + np.where(now > 0, config.threshold, margin)) * reference
    if config.rules.resize_ratio == "auto":
        # Pruning γ saves γ·M and costs the overhead, which is added to the excess time of Eq. 1. The times of a rank
        # that prunes already include it.
        overhead = np.where(now > 0, 0.0, config.rules.resize_overhead)
        wanted = resize_ratios(work + overhead * matmul, matmul, reference, config.largest_resize)
    else:
        wanted = np.full(len(times), float(config.rules.resize_ratio))
        slow |= config.rules.every_rank
    wanted = np.where(slow, wanted, 0.0)
    close_enough = (now > 0) & (wanted > 0) & (np.abs(wanted - now) * matmul <= precision * reference)
    return BalancePlan.resizing(tuple(float(ratio) for ratio in np.where(close_enough, now, wanted)))


def _worth_changing(
    times: Sequence[RankTimes], costs: Costs, config: BalanceConfig, current: BalancePlan, wanted: BalancePlan
) -> BalancePlan:
    """``wanted`` if it gains enough over ``current``; ``current`` is dropped if it relieves a rank that is not slow."""
    slow_from = (1 + config.threshold) * min(time.work_seconds for time in times)
    idle = BalancePlan.idle(len(times))
    relief = zip(times, current.resize, current.migrate, strict=True)
    if any(resize + migrate > 0 and time.work_seconds <= slow_from for time, resize, migrate in relief):
        current = idle
    if wanted == current:
        return wanted
    before, after = (predicted_seconds(times, costs, plan) for plan in (current, wanted))
    # To start balancing, half of the gain that is needed to replace a balancing plan is enough.
    if before - after > (config.threshold / 2 if current == idle else config.threshold) * before:
        return wanted
    if current != idle:
        return current
    return BalancePlan.idle(len(times), f"balancing would gain too little: {after:.3g} s with, {before:.3g} s without")


def _in_steps(plan: BalancePlan, max_resize: float) -> BalancePlan:
    """``plan`` in multiples of 1/STEPS; as much is taken as is given, and at most ``max_resize`` is pruned."""
    given = np.floor(np.array(plan.migrate) * STEPS + 0.5)
    taken = np.cumsum(plan.receive)
    if taken[-1] > 0:
        taken = np.floor(taken * (given.sum() / taken[-1]) + 0.5)
    resized = np.minimum(np.floor(np.array(plan.resize) * STEPS + 0.5), np.floor(max_resize * STEPS))
    resize, migrate, receive = (
        tuple((steps / STEPS).tolist()) for steps in (resized, given, np.diff(taken, prepend=0.0))
    )
    return BalancePlan(resize, migrate, receive, plan.note)


# Resharding ----------------------------------------------------------------------------------------------------------
# Decisions when units are permanently re-sharded, and when they are taken back; equal on all ranks. If a rank stays
# slow, it is cheaper to move units once, with their optimizer state, than to send weights and gradients each time.


def relieved_ranks(plan: BalancePlan) -> frozenset[int]:
    """The ranks that give units of some kind of blocks away."""
    ranks = range(len(plan.migrate))
    return frozenset(
        rank
        for rank in ranks
        if plan.migrate[rank] > 0 or any(counts[rank] * len(counts) < sum(counts) for counts in plan.units)
    )


def relieved_for(before: Sequence[int], plan: BalancePlan) -> tuple[int, ...]:
    """Number of successive iterations that each rank has been relieved for, including one with ``plan``."""
    relieved = relieved_ranks(plan)
    return tuple(count + 1 if rank in relieved else 0 for rank, count in enumerate(before))


def wants_resharding(plan: BalancePlan, relieved: Sequence[int], after: int | None) -> bool:
    """True if ``plan`` relieves a rank that has been relieved for ``after`` iterations, also by earlier plans. Units of
    other ranks move with its own: taking them back takes as long as few iterations in which they migrate."""
    return after is not None and any(relieved[rank] >= after for rank in relieved_ranks(plan))


def stays_resharded(current: BalancePlan, wanted: BalancePlan) -> bool:
    """True if units stay permanently re-sharded when ``wanted`` replaces ``current``, because both relieve some of the
    same ranks; then only the difference moves. Otherwise all units are taken back."""
    return bool(relieved_ranks(wanted) & relieved_ranks(current))
