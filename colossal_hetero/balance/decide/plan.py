"""What the deciding half works on: the times that ranks take, and the plan that is made of them."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["BalancePlan", "RankTimes"]


@dataclass(frozen=True)
class RankTimes:
    """What an iteration takes a rank at its full share of the work."""

    work_seconds: float
    """T: own compute, waiting inside collectives excluded."""
    matmul_seconds: float
    """M: the part of T that the way of balancing can move: products of the parallel linear layers; in block form also
    what lies between a block's products."""
    communication_seconds: float = 0.0
    """Time inside collectives when nobody waits."""

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
    """What every rank of a tensor-parallel group does in the coming iterations. Shares of one rank's full work."""

    resize: tuple[float, ...]
    """γ per rank: the share of its work that it prunes."""
    migrate: tuple[float, ...]
    """The share of its work that each rank gives to others."""
    receive: tuple[float, ...]
    """The extra share that each rank takes from others; together as much as is given."""
    note: str = field(default="", compare=False)
    """What was decided and why, for the report."""

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
                    f"rank {rank} is to prune {resize} and to give away {migrate} of its work: that is more than all"
                )
            if migrate > 0.0 and receive > 0.0:
                raise ValueError(
                    f"rank {rank} is both to give away {migrate} and to receive {receive}; only one makes sense"
                )
        given, taken = math.fsum(self.migrate), math.fsum(self.receive)
        if abs(given - taken) > 1e-9 * max(given, taken) + 1e-12:
            raise ValueError(f"ranks give away {given} and receive {taken}; both must be the same")

    @classmethod
    def idle(cls, ranks: int, note: str = "") -> BalancePlan:
        """Everyone does the full share."""
        return cls.resizing((0.0,) * ranks, note)

    @classmethod
    def resizing(cls, resize: Sequence[float], note: str = "") -> BalancePlan:
        """A plan by which nothing is migrated."""
        nothing = (0.0,) * len(resize)
        return cls(tuple(resize), nothing, nothing, note)

    def limited(self, most: float) -> BalancePlan:
        """This plan with all that migrates scaled down, so that no rank receives more than the share ``most``."""
        largest = max(self.receive)
        if largest <= most:
            return self
        scale = most / largest
        return BalancePlan(
            self.resize,
            tuple(scale * share for share in self.migrate),
            tuple(scale * share for share in self.receive),
            f"receivers have memory for no more than {most:.0%} of their own work; {self.note}",
        )

    def load(self, rank: int) -> float:
        """How much the rank computes, 1.0 being its full share."""
        return 1.0 - self.resize[rank] - self.migrate[rank] + self.receive[rank]

    @property
    def digest(self) -> int:
        """A number below 2³¹ that is the same in all processes that have the same plan, and hardly in others."""
        shares = (*self.resize, *self.migrate, *self.receive)
        packed = struct.pack(f"<{len(shares)}d", *(share + 0.0 for share in shares))
        return int.from_bytes(hashlib.blake2b(packed, digest_size=4).digest(), "little") >> 1
