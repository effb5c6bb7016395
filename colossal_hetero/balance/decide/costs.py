"""What balancing itself costs: the functions Ω and Φ of SEMI (Sec. IV-B), and what an iteration takes with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import ArrayLike

from .plan import BalancePlan, RankTimes

__all__ = ["Costs", "Traffic", "Volume", "fit_affine", "predicted_seconds"]

SCALE_LIMIT = 4.0
"""The furthest that :attr:`Costs.communication_scale` moves from 1, either way: beyond it the costs were measured on
another network."""


@dataclass(frozen=True)
class Volume:
    """Messages of one kind, and their bytes together."""

    messages: int = 0
    bytes: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.messages + other.messages, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Volume:
        return Volume(self.messages * times, self.bytes * times)

    __rmul__ = __mul__


@dataclass(frozen=True)
class Traffic:
    """What migration sends in one iteration, by kind of message, all ranks of the group together."""

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
    """The costs of balancing as affine functions of the share ``c`` of one rank's work that is pruned or given away.

    The defaults are those of a machine on which it costs nothing.
    """

    resize_fixed: float = 0.0
    """Ω1: what pruning anything adds to a rank's products, as a share of its M, so that it is more on a slow rank."""
    resize_per_share: float = 0.0
    """Ω2: what pruning adds per share pruned, as a share of the rank's M."""
    migrate_fixed_seconds: float = 0.0
    """Φ1: what an iteration takes longer in which anything at all is migrated."""
    migrate_seconds_per_share: float = 0.0
    """Φ1: what it takes longer per share given away, by all ranks together."""
    receive_factor: float = 1.0
    """Φ2: a received share takes the receiver this many times what its own share does, above zero."""
    communication_scale: float = 1.0
    """Factor on Φ1, learnt while training, above zero."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{each.name}={value} must be finite and not negative")
        for name in ("receive_factor", "communication_scale"):
            if getattr(self, name) == 0.0:
                raise ValueError(f"{name}=0 must be positive: nothing is computed or sent in no time")

    def omega(self, share: float, matmul_seconds: float) -> float:
        """Seconds that pruning ``share`` adds on a rank whose products take ``matmul_seconds`` (Ω1 + Ω2)."""
        return (self.resize_fixed + self.resize_per_share * share) * matmul_seconds if share > 0 else 0.0

    def phi1(self, share: float) -> float:
        """Seconds of communication in an iteration in which ``share`` is migrated, all senders together (Φ1)."""
        seconds = self.migrate_fixed_seconds + self.migrate_seconds_per_share * share
        return self.communication_scale * seconds if share > 0 else 0.0

    def phi2(self, share: float, matmul_seconds: float) -> float:
        """Seconds that a received ``share`` takes a receiver whose own products take ``matmul_seconds`` (Φ2)."""
        return self.receive_factor * share * matmul_seconds

    def corrected(self, predicted_seconds: float, measured_seconds: float) -> Costs:
        """Φ1 scaled half of the way, in ratio, from what these costs predicted towards what was measured.

        The scale stays within a factor of :data:`SCALE_LIMIT` of the pre-test. Without a prediction, or with times
        that are not finite, there is nothing to learn.
        """
        if not (0.0 < predicted_seconds < math.inf and 0.0 <= measured_seconds < math.inf):
            return self
        scale = self.communication_scale * math.sqrt(measured_seconds / predicted_seconds)
        return replace(self, communication_scale=min(max(scale, 1.0 / SCALE_LIMIT), SCALE_LIMIT))


def fit_affine(xs: ArrayLike, ys: ArrayLike) -> tuple[float, float]:
    """``(fixed, slope)`` of the least-squares line ``y = fixed + slope·x``, neither negative.

    Where the line has a negative part, that part is zero and the other one fits best without it. ``xs`` and ``ys`` are
    of one length, at least one.
    """
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    if x.shape != y.shape or x.ndim != 1 or not len(x):
        raise ValueError(f"xs of shape {x.shape} and ys of shape {y.shape}: need as many as the other, at least one")
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
    """Seconds of an iteration under ``plan``: the longest work of any rank, and the communication.

    Of the communication in ``times`` the least counts: what another rank spends beyond it is waiting.
    """
    work = 0.0
    for rank, time in enumerate(times):
        matmul = time.matmul_seconds
        own = time.work_seconds - (plan.resize[rank] + plan.migrate[rank]) * matmul
        extra = costs.phi2(plan.receive[rank], matmul) + costs.omega(plan.resize[rank], matmul)
        work = max(work, own + extra)
    return work + costs.phi1(math.fsum(plan.migrate)) + min(time.communication_seconds for time in times)
