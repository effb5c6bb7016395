"""Pruning ratios: per rank from measured times, and per layer from the rank's ratio (SEMI, Sec. III)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ..config import BalanceConfig

__all__ = ["layer_ratios", "resize_ratios"]


def resize_ratios(
    work_seconds: ArrayLike, matmul_seconds: ArrayLike, reference_seconds: float, max_resize: float
) -> np.ndarray:
    """``γ_i = (T_i − T_ref) / M_i``, clipped to [0, γ_max] (SEMI, Eq. 1); float64 ``[ranks]``.

    A rank without products to prune (``M_i = 0``) gets 0.
    """
    work, matmul = np.asarray(work_seconds, dtype=float), np.asarray(matmul_seconds, dtype=float)
    excess = np.maximum(work - reference_seconds, 0.0)
    # Products are compared, because dividing by a tiny M could overflow.
    beyond = excess >= max_resize * matmul
    ratios = np.divide(excess, matmul, out=np.full_like(excess, max_resize), where=~beyond)
    return np.where(matmul > 0, ratios, 0.0)


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
        limited: np.ndarray = np.minimum(printed, config.max_resize)
        return limited
    assert ratio <= config.max_resize
    full = np.zeros(len(shares), dtype=bool)
    while not full.all():
        # Layers at the maximum stay there; the others share the rest of the budget in proportion to their printed
        # ratio. If all of these are zero, they share it evenly.
        weight = np.where(full, 0.0, printed)
        free = weight / weight.max() if weight.any() else np.where(full, 0.0, 1.0)
        rest = ratio * cost.sum() - config.max_resize * cost[full].sum()
        ratios = np.where(full, config.max_resize, free * rest / (cost * free).sum())
        over = ~full & (ratios > config.max_resize)
        if not over.any():
            return np.maximum(ratios, 0.0)
        full |= over
    return np.full(len(shares), config.max_resize)
