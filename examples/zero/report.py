"""What the ZeRO example shows and writes: how batches were divided, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from colossal_hetero.planner.batches.allocation import Allocation, Share
from examples.common.comparison import ComparisonReport, Training
from examples.common.terminal import compact_table, warmup_iterations


@dataclass
class ZeroTraining(Training):
    """Training with one method to divide batches."""

    stage: int = 0
    """ZeRO stage, also where ``--stage auto`` left it open."""
    boost_seconds: float = 0.0
    """Time until training could begin, including measuring the devices where no profile was there."""
    allocations: list[Allocation] = field(default_factory=list)
    """How global batches were divided at the beginning of each epoch."""
    reallocations: int = 0
    """How often they were divided again, because a rank's speed had changed."""

    @property
    def allocation(self) -> Allocation:
        """The latest."""
        return self.allocations[-1]

    @property
    def settled_seconds(self) -> list[float]:
        """Durations of the iterations after warm-up and since batches were divided last."""
        latest = self.allocation.shares
        same = 0
        for allocation in reversed(self.allocations):
            if allocation.shares != latest:
                break
            same += 1
        first = (len(self.allocations) - same) * (len(self.seconds) // len(self.allocations))
        return self.seconds[max(first, warmup_iterations(len(self.seconds))) :]

    @property
    def predicted_seconds(self) -> float:
        return self.allocation.wall_seconds

    @property
    def wait_seconds(self) -> list[float]:
        """By rank: time of an iteration beyond the rank's own computing, for waiting and communication."""
        return [max(0.0, self.iteration_seconds - busy) for busy in self.allocation.busy_seconds]


class ZeroReport(ComparisonReport[ZeroTraining]):
    """See :class:`ComparisonReport`."""

    WAYS_ARE = "batches"
    FITTED = "Batches that fit the devices"
    FILES = ("summary", "profile")

    def _summary_of(self, training: ZeroTraining) -> dict[str, Any]:
        allocation = training.allocation
        return {
            "method": training.name,
            "stage": training.stage,
            "boost_seconds": training.boost_seconds,
            "ranks": [
                {
                    "rank": rank,
                    "samples": share.samples,
                    "micro_batches": list(share.sizes),
                    "busy_seconds": allocation.busy_seconds[rank],
                    "wait_seconds": training.wait_seconds[rank],
                    "peak_memory_bytes": training.peak_memory_bytes[rank],
                }
                for rank, share in enumerate(allocation.shares)
            ],
            "reallocations": training.reallocations,
            **super()._summary_of(training),
        }

    def _rank_table(self) -> Any:
        columns = ("rank", *self._slowed_heading, "images", "micro-batches", "busy", "wait")
        table = compact_table("An iteration, by rank (times in ms)", "batches", *columns)
        for training in self.trainings:
            for rank, share in enumerate(training.allocation.shares):
                times = (training.allocation.busy_seconds[rank], training.wait_seconds[rank])
                table.add_row(
                    training.name if rank == 0 else "",
                    str(rank),
                    *self._slowed(rank),
                    str(share.samples),
                    _in_words(share),
                    *(f"{seconds * 1e3:.0f}" for seconds in times),
                )
        return table


def _in_words(share: Share) -> str:
    """For example ``26 × 2`` or ``7 × 3 + 6``."""
    return " + ".join(f"{size} × {count}" if count > 1 else str(size) for size, count in share.runs)
