"""Who prunes how much: pure functions from measured times to a plan (SEMI, Sec. III)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

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
    work_seconds: ArrayLike, matmul_seconds: ArrayLike, reference_seconds: float, max_resize: float
) -> np.ndarray:
    """``γ_i = (T_i − T_ref) / M_i``, clipped to [0, γ_max] (SEMI, Eq. 1); float64 ``[ranks]``.

    A rank without products to prune (``M_i = 0``) gets 0.
    """
    work, matmul = np.asarray(work_seconds, dtype=float), np.asarray(matmul_seconds, dtype=float)
    excess = np.maximum(work - reference_seconds, 0.0)
    # Compared as products: a quotient by a tiny M overflows.
    beyond = excess >= max_resize * matmul
    ratios = np.divide(excess, matmul, out=np.full_like(excess, max_resize), where=~beyond)
    return np.where(matmul > 0, ratios, 0.0)


def decide(times: Sequence[RankTimes], config: BalanceConfig, current: Plan) -> Plan:
    """The plan for the group's equal-work ``times``, which keeps to ``current`` where a change would not pay.

    A rank is pruned only if it is slower than T_ref by more than the margin, and the ratio of one that prunes already
    moves only if that changes its time by more than the margin. Together with the threshold below which times are not
    even exchanged, that keeps noise from moving the plan.
    """
    work = np.array([rank.work_seconds for rank in times])
    matmul = np.array([rank.matmul_seconds for rank in times])
    now = np.array(current.resize)
    if config.mode == "off":
        return Plan.idle(len(times))
    reference = float(work.min() if config.reference == "minimum" else work.mean())
    slow = work > (1 + config.margin) * reference
    if config.resize_ratio == "auto":
        # Pruning γ saves γ·M and costs the overhead: for Eq. 1 the rank has that much more to lose.
        wanted = resize_ratios(work + config.resize_overhead * matmul, matmul, reference, config.max_resize)
    else:
        wanted = np.full(len(times), float(config.resize_ratio))
    wanted = np.where(slow, wanted, 0.0)
    close_enough = (now > 0) & (wanted > 0) & (np.abs(wanted - now) * matmul <= config.margin * reference)
    return Plan(resize=tuple(float(ratio) for ratio in np.where(close_enough, now, wanted)))


def layer_ratios(
    ratio: float, candidate_shares: Sequence[float], costs: Sequence[float], config: BalanceConfig
) -> np.ndarray:
    """``γ_k`` per layer for the rank's ``ratio`` γ (SEMI, Sec. III-B, Algorithm 1 line 11); float64 ``[layers]``.

    ``candidate_shares`` are the shares of columns whose weights vary little, ``costs`` (c_k) the layers' matmul
    times in any unit. ``printed``: ``max(share, α·γ)``. ``budgeted`` scales these so that ``Σ c_k γ_k = γ Σ c_k``
    with each within [0, γ_max]; γ itself must not exceed γ_max.
    """
    shares, cost = np.asarray(candidate_shares, dtype=float), np.asarray(costs, dtype=float)
    if ratio == 0.0 or len(shares) == 0:
        return np.zeros(len(shares))
    printed = np.maximum(shares, config.decay * ratio)
    if config.ratio_form == "printed":
        return np.minimum(printed, config.max_resize)
    assert ratio <= config.max_resize
    full = np.zeros(len(shares), dtype=bool)
    while not full.all():
        # Layers at the cap give what they can; the others share the rest of the budget in proportion to their wish.
        # Where only layers without a wish are left, they share it evenly.
        wish = np.where(full, 0.0, printed)
        free = wish / wish.max() if wish.any() else np.where(full, 0.0, 1.0)
        rest = ratio * cost.sum() - config.max_resize * cost[full].sum()
        ratios = np.where(full, config.max_resize, free * rest / (cost * free).sum())
        over = ~full & (ratios > config.max_resize)
        if not over.any():
            return np.maximum(ratios, 0.0)
        full |= over
    return np.full(len(shares), config.max_resize)
