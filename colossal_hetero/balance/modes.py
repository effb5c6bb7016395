"""Amount that each rank computes: from measured times and costs to a plan, by the rule of the mode: whole units and
parts of columns (exact), Eq. 1 (``resize``), or SEMI's Algorithm 2 (``semi``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum

import numpy as np

from .config import BalanceConfig
from .plan import BalancePlan, Costs, Counts, RankTimes, predicted_seconds
from .ratios import KindProblem, Line, fastest_counts, resize_ratios

# Division ------------------------------------------------------------------------------------------------------------

MIN_GAIN = 0.005
"""Minimum gain for which a division is changed, as a share of the time of what can be divided."""


def iteration_seconds(problems: Sequence[KindProblem], counts: Counts, fixed_seconds: float = 0.0) -> float:
    """Seconds of all kinds in an iteration: a sum over kinds of the time of the slowest rank, because ranks wait for
    each other at the end of each layer or block. ``fixed_seconds`` is what moving anything at all adds."""
    moves = any(problem.moved(of_kind) for problem, of_kind in zip(problems, counts, strict=True))
    work = fsum(problem.seconds(of_kind) for problem, of_kind in zip(problems, counts, strict=True))
    return work + (fixed_seconds if moves else 0.0)


def decide_counts(
    problems: Sequence[KindProblem], current: Counts, uncertainty: float, fixed_seconds: float = 0.0
) -> tuple[Counts, str]:
    """The counts from now on, and why. They stay ``current`` unless others save more than ``uncertainty``, a share of
    that time below which a difference may be chance; moving nothing is preferred to saving less than half."""
    nothing, wanted = tuple(problem.nothing for problem in problems), tuple(map(fastest_counts, problems))
    now, best, without = (iteration_seconds(problems, counts, fixed_seconds) for counts in (current, wanted, nothing))
    required = max(uncertainty, MIN_GAIN)
    if without - best <= required / 2 * without:
        wanted, best = nothing, without
    compared = f"{best:.3g} s with, {without:.3g} s without"
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


COLUMN_PARTS = 64
"""Parts in which the columns of layers in no block are divided over ranks; a layer rounds them to its own grains."""


@dataclass(frozen=True)
class LayerKind:
    """Layers or blocks of a rank that are divided in the same way."""

    units: int
    """Units of each block; :data:`COLUMN_PARTS` of layers that are divided by their columns."""
    grain: int
    weight: float
    """The kind's share of the cost of all products that can be divided."""
    moves: bool = True


@dataclass(frozen=True)
class UnitWork:
    """The work of layers and blocks by units, as :class:`RankTimes` are for shares of all work."""

    kinds: Sequence[LayerKind]
    lines: Sequence[Sequence[Line]]
    scale: float = 1.0
    """Seconds of the present iterations for one second of ``lines``."""

    @classmethod
    def of_columns(cls, times: Sequence[RankTimes], receive_factor: float) -> UnitWork:
        """All work as layers that are divided by their columns."""
        slopes = [time.matmul_seconds / COLUMN_PARTS for time in times]
        lines = [
            Line(COLUMN_PARTS, time.work_seconds, slope, receive_factor * slope, COLUMN_PARTS)
            for time, slope in zip(times, slopes, strict=True)
        ]
        return cls([LayerKind(COLUMN_PARTS, 1, 1.0)], [lines])


def decide(
    times: Sequence[RankTimes],
    costs: Costs,
    config: BalanceConfig,
    current: BalancePlan,
    uncertainty: float | None = None,
    units: UnitWork | None = None,
    max_received: float = math.inf,
) -> BalancePlan:
    """The plan for the group's equal-work ``times``; it is ``current`` if a change would gain too little. In exact
    modes it has whole units of each kind (by ``units``; None: by ``times``), otherwise shares of all work.

    In modes that prune, only ranks are relieved that are slower than T_ref (``resize``) or the fastest rank (``semi``)
    by more than the threshold. ``current`` is replaced only if the ``uncertainty`` of the times, a share of them (None:
    the threshold), does not explain the difference. ``max_received``: the largest share of its own work that a receiver
    has memory for."""
    if config.mode == "off":
        return BalancePlan.idle(len(times))
    if config.is_exact:
        units = units or UnitWork.of_columns(times, costs.receive_factor)
        limit = config.threshold if uncertainty is None else uncertainty
        return _decide_units(units, costs, config, current, limit, max_received)
    # The difference of two times is less certain than each of them.
    difference = config.threshold if uncertainty is None else math.sqrt(2.0) * uncertainty
    margin = max(config.threshold, difference)
    most = config.largest_resize
    if config.mode == "resize":
        return _decide_resize(times, config, current, margin, max(difference, MIN_GAIN))
    wanted = _in_steps(semi_plan(times, costs, most, margin), most)
    return _worth_changing(times, costs, config, current, wanted).limited(max_received)


def _decide_units(
    work: UnitWork, costs: Costs, config: BalanceConfig, current: BalancePlan, uncertainty: float, max_received: float
) -> BalancePlan:
    """The fastest division of the whole units of each kind, which prunes nothing. Ranks wait for each other at the end
    of every layer or block, so kinds are independent."""
    ranks = len(current.resize)
    # Mode "migrate" migrates whatever sending costs.
    sends = 0.0 if config.mode == "migrate" else costs.communication_scale / work.scale
    problems = []
    for kind, lines in zip(work.kinds, work.lines, strict=True):
        most = min(max_received, ranks - 1.0) if kind.moves else 0.0
        per_unit = sends * costs.migrate_seconds_per_share * kind.weight / kind.units
        problems.append(KindProblem(kind.units, kind.grain, int(most * kind.units), lines, per_unit))
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
    if counts == nothing:
        return BalancePlan.idle(ranks, note)
    more = [
        fsum(kind.weight * (each[rank] / kind.units - 1.0) for kind, each in zip(work.kinds, counts, strict=True))
        for rank in range(ranks)
    ]
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


# Semi ----------------------------------------------------------------------------------------------------------------
# SEMI's Algorithm 2; what is different from the print is in docs/algorithms.md, 1.6.

RESERVE = 1e-3
"""Minimum share of its work that a rank keeps, so that its speed can still be measured."""


def semi_plan(
    times: Sequence[RankTimes], costs: Costs, max_resize: float, straggler_margin: float = 0.0
) -> BalancePlan:
    """The plan of Algorithm 2: a single straggler splits its excess by Eq. 2; of several, the slowest migrate and the
    others resize. Of all numbers up to the maximum of Eq. 3, the one with the shortest predicted time migrates, because
    Eq. 3 compares migrating with doing nothing, not with resizing: in Fig. 11 one straggler too many migrates."""
    slowest = _stragglers(times, straggler_margin)
    if not slowest:
        return BalancePlan.idle(len(times), "no rank is slow")
    if len(slowest) > 1:
        max_migrating = migrating_stragglers(times, costs, slowest)
        # Of equally fast divisions it is the one that prunes least.
        divisions = [
            divide_stragglers(times, slowest[:count], slowest, max_resize) for count in range(max_migrating, -1, -1)
        ]
        return min(divisions, key=lambda plan: predicted_seconds(times, costs, plan))
    (slow,) = slowest
    resized, migrated = resize_and_migrate(times, costs, slow, max_resize)
    taken = migrated / (len(times) - 1)
    return BalancePlan(
        resize=tuple(resized if rank == slow else 0.0 for rank in range(len(times))),
        migrate=tuple(migrated if rank == slow else 0.0 for rank in range(len(times))),
        receive=tuple(0.0 if rank == slow else taken for rank in range(len(times))),
        note=f"Eq. 2: the straggler migrates {migrated:.0%} of its work and prunes {resized:.0%}",
    )


def resize_and_migrate(times: Sequence[RankTimes], costs: Costs, slow: int, max_resize: float) -> tuple[float, float]:
    """``(γ(1−β), γβ)`` for the only straggler: the shares that it prunes and migrates (Eq. 2), clipped to possible
    ones. β makes the straggler's cost of resizing equal to the slowest receiver's cost of migrating, ``Ω1 + Ω2(γ(1−β))
    = Φ1(γβ) + Φ2(γβ/(e−1))``, in which all terms are affine in β."""
    matmul = times[slow].matmul_seconds
    excess = float(_excess(times)[slow])
    receiver = max(time.matmul_seconds for rank, time in enumerate(times) if rank != slow)
    resizing_all = (costs.resize_fixed + costs.resize_per_share * excess) * matmul
    fixed = costs.communication_scale * costs.migrate_fixed_seconds
    per_share = (
        costs.resize_per_share * matmul
        + costs.communication_scale * costs.migrate_seconds_per_share
        + costs.phi2(1.0, receiver) / (len(times) - 1)
    )
    lead = resizing_all - fixed
    migrated = excess if lead >= per_share * excess else max(lead, 0.0) / per_share
    migrated = max(migrated, excess - max_resize)
    return excess - migrated, migrated


def migrating_stragglers(times: Sequence[RankTimes], costs: Costs, slowest: Sequence[int]) -> int:
    """Number of stragglers, ``slowest`` first, that migrate (Eq. 3, as in docs/algorithms.md, 1.6): the largest x up to
    which all f are positive."""
    work = np.array([time.work_seconds for time in times])
    excess = _excess(times)
    receivers = sorted(set(range(len(times))).difference(slowest))
    receiver = max(times[rank].matmul_seconds for rank in receivers)
    moved = 0.0
    for x, rank in enumerate(slowest):
        moved += float(excess[rank])
        saved = float(work[rank] - work.min())
        if saved - costs.phi1(moved) - costs.phi2(moved / len(receivers), receiver) <= 0.0:
            return x
    return len(slowest)


def divide_stragglers(
    times: Sequence[RankTimes], migrating: Sequence[int], stragglers: Sequence[int], max_resize: float
) -> BalancePlan:
    """The plan in which the ranks ``migrating`` give away their excess, and the other ``stragglers`` prune theirs up to
    ``max_resize``. All other ranks receive equal shares (Algorithm 2, lines 20 to 24)."""
    excess = _excess(times)
    resize, migrate, receive = (np.zeros(len(times)) for _ in range(3))
    resizing = sorted(set(stragglers).difference(migrating))
    receivers = sorted(set(range(len(times))).difference(stragglers))
    resize[resizing] = np.minimum(excess[resizing], max_resize)
    migrate[list(migrating)] = excess[list(migrating)]
    receive[receivers] = migrate.sum() / len(receivers)
    return BalancePlan(
        resize=tuple(resize.tolist()),
        migrate=tuple(migrate.tolist()),
        receive=tuple(receive.tolist()),
        note=f"Eq. 3: of {len(stragglers)} stragglers {len(migrating)} migrate and {len(resizing)} resize",
    )


def _stragglers(times: Sequence[RankTimes], margin: float) -> list[int]:
    work = [time.work_seconds for time in times]
    slow_from = (1 + margin) * min(work)
    slow = [rank for rank, time in enumerate(times) if work[rank] > slow_from and time.matmul_seconds > 0]
    return sorted(slow, key=lambda rank: (-work[rank], rank))


def _excess(times: Sequence[RankTimes]) -> np.ndarray:
    """γ of Eq. 1 with T_min: the share of its work that makes each rank late, at most 1 − RESERVE; ``[ranks]``."""
    work = np.array([time.work_seconds for time in times])
    return resize_ratios(work, [time.matmul_seconds for time in times], float(work.min()), 1.0 - RESERVE)


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
