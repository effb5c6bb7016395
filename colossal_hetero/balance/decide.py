"""Who prunes how much: pure functions from measured times to a plan (SEMI, Sec. III)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .config import BalanceConfig

__all__ = ["Plan", "RankTimes", "decide", "layer_ratios", "resize_ratios"]


@dataclass(frozen=True)
class RankTimes:
    """What an iteration takes a rank at its full share of the work."""

    work_seconds: float
    """T: own compute, waiting inside collectives excluded."""
    matmul_seconds: float
    """M: the part of T spent in products of the parallel linear layers."""

    def __post_init__(self) -> None:
        if not (0.0 < self.work_seconds < np.inf and 0.0 <= self.matmul_seconds < np.inf):
            raise ValueError(
                f"work_seconds={self.work_seconds} and matmul_seconds={self.matmul_seconds}: times must be finite, "
                "work above zero and matmul not negative"
            )


@dataclass(frozen=True)
class Plan:
    """What every rank of a tensor-parallel group does in the coming iterations."""

    resize: tuple[float, ...]
    """γ per rank: the share of its columns that it prunes."""

    @classmethod
    def idle(cls, ranks: int) -> Plan:
        """Everyone does the full share."""
        return cls(resize=(0.0,) * ranks)


def resize_ratios(
    work_seconds: Sequence[float], matmul_seconds: Sequence[float], reference_seconds: float, max_resize: float
) -> np.ndarray:
    """``γ_i = (T_i − T_ref) / M_i``, clipped to [0, γ_max] (SEMI, Eq. 1); float64 ``[ranks]``.

    A rank without products to prune (``M_i = 0``) gets 0.
    """
    work, matmul = np.asarray(work_seconds, dtype=float), np.asarray(matmul_seconds, dtype=float)
    excess = np.maximum(work - reference_seconds, 0.0)
    ratios = np.divide(excess, matmul, out=np.zeros_like(excess), where=matmul > 0)
    return np.minimum(ratios, max_resize)


def decide(times: Sequence[RankTimes], config: BalanceConfig, current: Plan) -> Plan:
    """The plan for the group's equal-work ``times``, which keeps to ``current`` where a change would not pay.

    A rank that runs its full share is pruned only once it is slower than T_ref by more than the margin; one that prunes
    already goes on doing so until it is within half the margin, and its ratio moves only if that changes its time by
    more than the margin.
    """
    work = np.array([rank.work_seconds for rank in times])
    matmul = np.array([rank.matmul_seconds for rank in times])
    now = np.array(current.resize)
    if config.mode == "off":
        return Plan.idle(len(times))
    reference = float(work.min() if config.reference == "minimum" else work.mean())
    tolerance = np.where(now > 0, config.margin / 2, config.margin)
    slow = work > (1 + tolerance) * reference
    if config.resize_ratio == "auto":
        wanted = resize_ratios(work, matmul, reference, config.max_resize)
    else:
        wanted = np.full(len(times), float(config.resize_ratio))
    wanted = np.where(slow, wanted, 0.0)
    close_enough = (now > 0) & (wanted > 0) & (np.abs(wanted - now) * matmul <= config.margin * reference)
    return Plan(resize=tuple(float(ratio) for ratio in np.where(close_enough, now, wanted)))


def layer_ratios(
    ratio: float, candidate_shares: Sequence[float], costs: Sequence[float], config: BalanceConfig
) -> np.ndarray:
    """``γ_k`` per layer for the rank's ``ratio`` γ (SEMI, Sec. III-B, Algorithm 1 line 11); float64 ``[layers]``.

    ``candidate_shares`` are the shares of columns whose weights vary little, ``costs`` (c_k) the layers' matmul times in
    any unit. ``printed``: ``max(share, α·γ)``. ``budgeted`` scales these so that ``Σ c_k γ_k = γ Σ c_k`` with each within
    [0, γ_max]; γ itself must not exceed γ_max.
    """
    shares, cost = np.asarray(candidate_shares, dtype=float), np.asarray(costs, dtype=float)
    if ratio == 0.0 or len(shares) == 0:
        return np.zeros(len(shares))
    printed = np.maximum(shares, config.decay * ratio)
    if config.ratio_form == "printed":
        return np.minimum(printed, config.max_resize)
    assert ratio <= config.max_resize
    capped = np.zeros(len(shares), dtype=bool)
    while True:
        # Layers at the cap give what they can; the others share the rest of the budget in proportion.
        rest = ratio * cost.sum() - config.max_resize * cost[capped].sum()
        weight = (cost * np.where(printed > 0, printed, 1.0))[~capped].sum()
        scaled = np.where(
            capped, config.max_resize, np.where(printed > 0, printed, 1.0) * (rest / weight if weight else 0)
        )
        over = (scaled > config.max_resize * (1 + 1e-12)) & ~capped
        if not over.any():
            return np.clip(scaled, 0.0, config.max_resize)
        capped |= over
