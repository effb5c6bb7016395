"""The input and the result of a decision: the times that ranks take, and the plan."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from operator import add

import numpy as np
from numpy.typing import ArrayLike

Counts = tuple[tuple[int, ...], ...]
"""Number of units that each rank computes, for each kind of blocks."""


@dataclass(frozen=True)
class RankTimes:
    """The time of an iteration on one rank with its full share of the work."""

    work_seconds: float
    """T: all the rank's own work, without the time inside collectives."""
    matmul_seconds: float
    """M: the part of T that balancing moves: products of parallel layers, in block form also what is between."""
    communication_seconds: float = 0.0
    """Time inside collectives without waiting for other ranks."""

    def __post_init__(self) -> None:
        if not (0.0 < self.work_seconds < math.inf and 0.0 <= self.matmul_seconds < math.inf):
            raise ValueError(
                f"work_seconds={self.work_seconds} and matmul_seconds={self.matmul_seconds}: times must be finite, "
                "work above zero and matmul not negative"
            )
        if not 0.0 <= self.communication_seconds < math.inf:
            raise ValueError(f"communication_seconds={self.communication_seconds} must be finite and not negative")


@dataclass(frozen=True)
class BalancePlan:
    """Shares of one rank's full work that every rank of a tensor-parallel group prunes, gives and takes."""

    resize: tuple[float, ...]
    """γ of each rank: the share of its work that it prunes."""
    migrate: tuple[float, ...]
    """The share of its work that each rank gives to other ranks."""
    receive: tuple[float, ...]
    """The share that each rank takes from other ranks; the sum equals that of ``migrate``."""
    note: str = field(default="", compare=False)
    """Decision and its reason, as text for the report."""
    units: Counts = ()
    """Units of each rank, for each kind of blocks, which set the shares; if empty, shares are rounded to units."""

    def __post_init__(self) -> None:
        if not len(self.resize) == len(self.migrate) == len(self.receive):
            raise ValueError(
                f"a plan for {len(self.resize)}, {len(self.migrate)} and {len(self.receive)} ranks: resize, migrate "
                "and receive must have a share for each rank"
            )
        for name, shares in (("resize", self.resize), ("migrate", self.migrate), ("receive", self.receive)):
            for rank, share in enumerate(shares):
                if not 0.0 <= share < math.inf:
                    raise ValueError(f"{name}={share} of rank {rank}: a share must be finite and not negative")
        for rank, (resize, migrate, receive) in enumerate(zip(self.resize, self.migrate, self.receive, strict=True)):
            if resize + migrate > 1.0:
                raise ValueError(
                    f"rank {rank} prunes {resize} and gives away {migrate} of its work; the sum must not exceed 1"
                )
            if migrate > 0.0 and receive > 0.0:
                raise ValueError(
                    f"rank {rank} gives away {migrate} and receives {receive}; a rank can only do one of the two"
                )
        given, taken = math.fsum(self.migrate), math.fsum(self.receive)
        if abs(given - taken) > 1e-9 * max(given, taken) + 1e-12:
            raise ValueError(f"ranks give away {given} and receive {taken} in total; both must be equal")

    @classmethod
    def idle(cls, ranks: int, note: str = "") -> BalancePlan:
        """A plan in which every rank computes its full share."""
        return cls.resizing((0.0,) * ranks, note)

    @classmethod
    def resizing(cls, resize: Sequence[float], note: str = "") -> BalancePlan:
        """A plan in which nothing is migrated."""
        nothing = (0.0,) * len(resize)
        return cls(tuple(resize), nothing, nothing, note)

    @property
    def max_received(self) -> float:
        """The largest share of its own work, in any kind of blocks, that a rank receives."""
        return max([*self.receive, *(max(counts) * len(counts) / sum(counts) - 1.0 for counts in self.units)])

    def limited(self, max_receive: float) -> BalancePlan:
        """The plan without ``units``, scaled down so that no rank receives more than ``max_receive``."""
        largest = self.max_received
        if largest <= max_receive:
            return self
        scale = max_receive / largest
        return BalancePlan(
            self.resize,
            tuple(scale * share for share in self.migrate),
            tuple(scale * share for share in self.receive),
            f"receivers have memory for no more than {max_receive:.0%} of their own work; {self.note}",
        )

    def load(self, rank: int) -> float:
        """Amount that the rank computes; 1.0 is its full share."""
        return 1.0 - self.resize[rank] - self.migrate[rank] + self.receive[rank]

    @property
    def digest(self) -> int:
        """A hash below 2³¹ of the shares and units, which is equal in all processes that hold the same plan."""
        shares = (*self.resize, *self.migrate, *self.receive, *(count for counts in self.units for count in counts))
        packed = struct.pack(f"<{len(shares)}d", *(share + 0.0 for share in shares))
        return int.from_bytes(hashlib.blake2b(packed, digest_size=4).digest(), "little") >> 1


# Costs ---------------------------------------------------------------------------------------------------------------

SCALE_LIMIT = 4.0
"""Largest factor by which :attr:`Costs.communication_scale` may differ from 1, up or down. A larger difference would
mean that the costs were measured on another network."""


@dataclass(frozen=True)
class Volume:
    """The number of messages of one kind, and their bytes in total."""

    messages: int = 0
    bytes: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.messages + other.messages, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Volume:
        return Volume(self.messages * times, self.bytes * times)


@dataclass(frozen=True)
class Traffic:
    """Volumes that migration sends in one iteration, by kind of message."""

    point_to_point: Volume = Volume()
    broadcast: Volume = Volume()
    reduce: Volume = Volume()

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, vars(self).values(), vars(other).values()))

    def __mul__(self, times: int) -> Traffic:
        return Traffic(*(volume * times for volume in vars(self).values()))


@dataclass(frozen=True)
class Costs:
    """Costs of balancing, zero by default, as affine functions of the share of work that is pruned or given away."""

    resize_fixed: float = 0.0
    """Ω1: the time that pruning adds to a rank's products, however much is pruned, as a share of the rank's M."""
    resize_per_share: float = 0.0
    """Ω2: the time that pruning adds per share pruned, as a share of the rank's M."""
    migrate_fixed_seconds: float = 0.0
    """Φ1: seconds that an iteration takes longer if anything is migrated, however much."""
    migrate_seconds_per_share: float = 0.0
    """Φ1: seconds that it takes longer per share given away, summed over all ranks."""
    receive_factor: float = 1.0
    """Φ2: relative time of a received share, compared with the same share of the receiver's own work; above zero."""
    communication_scale: float = 1.0
    """Factor on Φ1 that is learned while training; above zero."""

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
        """These costs with Φ1 scaled by the square root of measured over predicted time, in total by at most
        :data:`SCALE_LIMIT`. They are unchanged without a prediction, or if times are not finite."""
        if not (0.0 < predicted_seconds < math.inf and 0.0 <= measured_seconds < math.inf):
            return self
        scale = self.communication_scale * math.sqrt(measured_seconds / predicted_seconds)
        return replace(self, communication_scale=min(max(scale, 1.0 / SCALE_LIMIT), SCALE_LIMIT))


def fit_affine(xs: ArrayLike, ys: ArrayLike) -> tuple[float, float]:
    """``(fixed, slope)`` of the least-squares line ``y = fixed + slope·x``. If one of the two would be negative, it is
    zero and the other one is fitted without it. ``xs`` and ``ys`` must have the same length, at least one."""
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
    """Seconds of an iteration under ``plan``: the longest work of any rank plus the communication, which is the minimum
    over ``times``; time that other ranks spend beyond it is waiting."""
    work = 0.0
    for rank, time in enumerate(times):
        matmul = time.matmul_seconds
        remaining = time.work_seconds - (plan.resize[rank] + plan.migrate[rank]) * matmul
        extra = costs.phi2(plan.receive[rank], matmul) + costs.omega(plan.resize[rank], matmul)
        work = max(work, remaining + extra)
    return work + costs.phi1(math.fsum(plan.migrate)) + min(time.communication_seconds for time in times)
