"""What balancing itself costs, the functions Ω and Φ of SEMI (Sec. IV-B), and the time of an iteration with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import ArrayLike

from .plan import BalancePlan, RankTimes

__all__ = ["Costs", "Traffic", "Volume", "fit_affine", "predicted_seconds"]

SCALE_LIMIT = 4.0
"""The largest factor by which :attr:`Costs.communication_scale` may differ from 1, up or down. A larger difference
would mean that the costs were measured on another network."""


@dataclass(frozen=True)
class Volume:
    """The number of messages of one kind, and their bytes in total."""

    messages: int = 0
    bytes: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.messages + other.messages, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Volume:
        return Volume(self.messages * times, self.bytes * times)

    __rmul__ = __mul__


@dataclass(frozen=True)
class Traffic:
    """What migration sends in one iteration, by kind of message."""

    point_to_point: Volume = Volume()
    broadcast: Volume = Volume()
    reduce: Volume = Volume()

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.point_to_point + other.point_to_point, self.broadcast + other.broadcast, self.reduce + other.reduce
        )

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.point_to_point * times, self.broadcast * times, self.reduce * times)

    __rmul__ = __mul__


@dataclass(frozen=True)
class Costs:
    """The costs of balancing as affine functions of the share of one rank's work that is pruned or given away.

    By default balancing costs nothing.
    """

    resize_fixed: float = 0.0
    """Ω1: the time that pruning adds to a rank's products, however much is pruned, as a share of the rank's M."""
    resize_per_share: float = 0.0
    """Ω2: the time that pruning adds per share pruned, as a share of the rank's M."""
    migrate_fixed_seconds: float = 0.0
    """Φ1: seconds that an iteration takes longer if anything is migrated, however much."""
    migrate_seconds_per_share: float = 0.0
    """Φ1: seconds that it takes longer per share given away, summed over all ranks."""
    receive_factor: float = 1.0
    """Φ2: how many times as long a received share takes as the same share of the receiver's own work; above zero."""
    communication_scale: float = 1.0
    """A factor on Φ1 that is learned while training; above zero."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{each.name}={value} must be finite and not negative")
        for name in ("receive_factor", "communication_scale"):
            if getattr(self, name) == 0.0:
                raise ValueError(f"{name}=0 must be positive: computing and sending take time")

    def omega(self, share: float, matmul_seconds: float) -> float:
        """Seconds that pruning ``share`` adds on a rank whose products take ``matmul_seconds`` (Ω1 + Ω2)."""
        return (self.resize_fixed + self.resize_per_share * share) * matmul_seconds if share > 0 else 0.0

    def phi1(self, share: float) -> float:
        """Seconds of communication in an iteration if all senders together migrate ``share`` (Φ1)."""
        seconds = self.migrate_fixed_seconds + self.migrate_seconds_per_share * share
        return self.communication_scale * seconds if share > 0 else 0.0

    def phi2(self, share: float, matmul_seconds: float) -> float:
        """Seconds for a received ``share`` on a receiver whose own products take ``matmul_seconds`` (Φ2)."""
        return self.receive_factor * share * matmul_seconds

    def corrected(self, predicted_seconds: float, measured_seconds: float) -> Costs:
        """These costs with Φ1 scaled by the square root of measured over predicted time.

        The total scale stays within a factor of :data:`SCALE_LIMIT` of the pre-test. Without a prediction, or with
        times that are not finite, the costs are returned unchanged.
        """
        if not (0.0 < predicted_seconds < math.inf and 0.0 <= measured_seconds < math.inf):
            return self
        scale = self.communication_scale * math.sqrt(measured_seconds / predicted_seconds)
        return replace(self, communication_scale=min(max(scale, 1.0 / SCALE_LIMIT), SCALE_LIMIT))


def fit_affine(xs: ArrayLike, ys: ArrayLike) -> tuple[float, float]:
    """``(fixed, slope)`` of the least-squares line ``y = fixed + slope·x``, neither negative.

    If one of the two would be negative, it is set to zero and the other one is fitted without it. ``xs`` and ``ys``
    must have the same length, at least one.

    Raises:
        ValueError: the lengths differ or are zero.
    """
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    if x.shape != y.shape or x.ndim != 1 or not len(x):
        raise ValueError(f"xs of shape {x.shape} and ys of shape {y.shape} must have the same length, at least one")
    deviation = x - x.mean()
    spread = float(deviation @ deviation)
    slope = float(deviation @ y) / spread if spread > 0 else 0.0
    if slope <= 0:
        return max(float(y.mean()), 0.0), 0.0
    fixed = float(y.mean()) - slope * float(x.mean())
    if fixed >= 0:
        return fixed, slope
    return 0.0, max(float(x @ y) / float(x @ x), 0.0)


def predicted_seconds(times: Sequence[RankTimes], costs: Costs, plan: BalancePlan) -> float:
    """Seconds of an iteration under ``plan``: the longest work of any rank plus the communication.

    The communication is the minimum over ``times``; time that other ranks spend beyond it is waiting.
    """
    work = 0.0
    for rank, time in enumerate(times):
        matmul = time.matmul_seconds
        remaining = time.work_seconds - (plan.resize[rank] + plan.migrate[rank]) * matmul
        extra = costs.phi2(plan.receive[rank], matmul) + costs.omega(plan.resize[rank], matmul)
        work = max(work, remaining + extra)
    return work + costs.phi1(math.fsum(plan.migrate)) + min(time.communication_seconds for time in times)
