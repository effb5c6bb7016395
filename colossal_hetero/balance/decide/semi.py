"""SEMI's division of stragglers into those that migrate and those that resize (Sec. IV-B, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .costs import Costs
from .optimum import RESERVE
from .plan import BalancePlan, RankTimes
from .ratios import resize_ratios

__all__ = ["divide_stragglers", "fastest_division", "migrating_stragglers", "resize_and_migrate", "semi_plan"]


def semi_plan(
    times: Sequence[RankTimes], costs: Costs, max_resize: float, straggler_margin: float = 0.0
) -> BalancePlan:
    """The plan of Algorithm 2.

    A single straggler splits its excess by Eq. 2. If there are several, the slowest migrate and the others resize. Eq.
    3 gives the maximum number that migrate; of all numbers up to it, the one with the shortest predicted time is taken.
    The reason is that Eq. 3 compares migrating with doing nothing, not with resizing, so in the paper's own Fig. 11 at
    least one straggler too many migrates. Line 8 of the printed algorithm has a misprint: the branch is that of the
    straggler, ``T_i > T_min``.

    Args:
        times: by rank, at equal work.
        costs: Ω and Φ.
        max_resize: γ_max; a single straggler migrates the part of its excess that it may not prune.
        straggler_margin: stragglers are the ranks slower than ``(1 + straggler_margin)·T_min``.
    """
    slowest = _stragglers(times, straggler_margin)
    if not slowest:
        return BalancePlan.idle(len(times), "no rank is slow")
    if len(slowest) > 1:
        max_migrating = migrating_stragglers(times, costs, slowest)
        count = fastest_division(times, costs, slowest, max_migrating, max_resize)
        return divide_stragglers(times, slowest[:count], slowest, max_resize)
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
    """``(γ(1−β), γβ)`` for the only straggler: the shares that it prunes and migrates (Eq. 2).

    β makes the cost of resizing for the straggler equal to the cost of migrating for a receiver,
    ``Ω1 + Ω2(γ(1−β)) = Φ1(γβ) + Φ2(γβ/(e−1))``. All terms are affine in β, so there is one solution, which is clipped
    so that both shares are possible. Φ2 is that of the slowest receiver.
    """
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
    """How many of the stragglers, ``slowest`` first, migrate (Eq. 3): the largest x up to which all f are positive.

    ``f(x) = (T_(x) − T_min) − Φ1(Γ(x)) − Φ2(Γ(x)/(e − z))``, with ``Γ(x) = Σ_{k≤x} (T_(k) − T_min)/M_(k)`` and the
    slowest receiver's Φ2. There are two differences from the printed equation. M is in the denominators, because only
    that part of T can be moved. And the receivers are the ``e − z`` ranks that are not stragglers, without the ``z −
    x`` that resize: these would take several times as long for a share, and would be late again after pruning.
    """
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


def fastest_division(
    times: Sequence[RankTimes], costs: Costs, slowest: Sequence[int], max_migrating: int, max_resize: float
) -> int:
    """How many of the stragglers, ``slowest`` first and at most ``max_migrating``, should migrate for the shortest
    time.

    Of several numbers with the same predicted time it is the largest, with which the least is pruned.
    """
    work = np.array([time.work_seconds for time in times])
    matmul = np.array([time.matmul_seconds for time in times])
    excess = _excess(times)[list(slowest)]
    receivers = sorted(set(range(len(times))).difference(slowest))
    slow_work, slow_matmul = work[list(slowest)], matmul[list(slowest)]
    pruned = np.minimum(excess, max_resize)
    omega = np.where(pruned > 0, costs.resize_fixed + costs.resize_per_share * pruned, 0.0)
    resizing = slow_work + (omega - pruned) * slow_matmul
    migrating = slow_work - excess * slow_matmul
    moved = np.concatenate([[0.0], np.cumsum(excess)])[: max_migrating + 1]
    taken = costs.phi2(1.0, 1.0) * moved / len(receivers)
    # For each number x of migrating ranks: the times of the latest receiving, resizing and migrating ranks.
    receiving = (work[receivers] + taken[:, None] * matmul[receivers]).max(axis=1)
    latest_resizing = np.append(np.maximum.accumulate(resizing[::-1])[::-1], 0.0)[: max_migrating + 1]
    latest_migrating = np.maximum.accumulate(np.append(0.0, migrating))[: max_migrating + 1]
    latest = np.maximum(np.maximum(receiving, latest_resizing), latest_migrating)
    seconds = latest + np.array([costs.phi1(float(share)) for share in moved])
    return int(max_migrating - seconds[::-1].argmin())


def divide_stragglers(
    times: Sequence[RankTimes], migrating: Sequence[int], stragglers: Sequence[int], max_resize: float
) -> BalancePlan:
    """The plan in which the ranks ``migrating`` give away their excess and the other ``stragglers`` prune theirs.

    Pruning is limited to ``max_resize``. Ranks that are not stragglers receive equal shares (Algorithm 2, lines 20 to
    24).
    """
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
    """Ranks slower than ``(1 + margin)·T_min`` that have work to move, the slowest first."""
    work = [time.work_seconds for time in times]
    slow_from = (1 + margin) * min(work)
    slow = [rank for rank, time in enumerate(times) if work[rank] > slow_from and time.matmul_seconds > 0]
    return sorted(slow, key=lambda rank: (-work[rank], rank))


def _excess(times: Sequence[RankTimes]) -> np.ndarray:
    """γ of Eq. 1 with T_min: the share of its work that makes each rank late, at most 1 − RESERVE; ``[ranks]``."""
    work = np.array([time.work_seconds for time in times])
    return resize_ratios(work, [time.matmul_seconds for time in times], float(work.min()), 1.0 - RESERVE)
