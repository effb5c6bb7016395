"""The input and the result of a decision: the times that ranks take, and the plan."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["BalancePlan", "Counts", "RankTimes"]

Counts = tuple[tuple[int, ...], ...]
"""For each kind of blocks, the number of units that each rank computes."""


@dataclass(frozen=True)
class RankTimes:
    """The time of an iteration on one rank with its full share of the work."""

    work_seconds: float
    """T: all the rank's own work, without the time inside collectives."""
    matmul_seconds: float
    """M: the part of T that balancing can move: products of the parallel linear layers, and in block form also the
    operations between a block's products."""
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
    """How much every rank of a tensor-parallel group computes in the next iterations.

    All values are shares of one rank's full work.
    """

    resize: tuple[float, ...]
    """γ of each rank: the share of its work that it prunes."""
    migrate: tuple[float, ...]
    """The share of its work that each rank gives to other ranks."""
    receive: tuple[float, ...]
    """The share that each rank takes from other ranks; the sum equals that of ``migrate``."""
    note: str = field(default="", compare=False)
    """What was decided and why, as text for the report."""
    units: Counts = ()
    """For each kind of blocks, how many units each rank computes. If it is empty, shares are rounded to whole units; if
    not, ``migrate`` and ``receive`` are the resulting shares of all work."""

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
        """This plan with all that migrates scaled down, so that no rank receives more than ``max_receive``.

        Its shares are scaled, so the result has no ``units``.
        """
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
        """How much the rank computes; 1.0 is its full share."""
        return 1.0 - self.resize[rank] - self.migrate[rank] + self.receive[rank]

    @property
    def digest(self) -> int:
        """A hash below 2³¹ of the shares and units, which is equal in all processes that hold the same plan."""
        shares = (*self.resize, *self.migrate, *self.receive, *(count for counts in self.units for count in counts))
        packed = struct.pack(f"<{len(shares)}d", *(share + 0.0 for share in shares))
        return int.from_bytes(hashlib.blake2b(packed, digest_size=4).digest(), "little") >> 1
