"""What a run with tensor parallelism measured, and its summary. Rank 0 only."""

from __future__ import annotations

import dataclasses
from statistics import median
from typing import Any

from colossal_hetero.balance.report import BalanceReport, IterationRecord, WhatIf, ideal_ratio, report
from colossal_hetero.testing.stragglers import Stragglers

from .tensor_parallel import Layout, TensorParallelOptions
from .terminal import finite, quantiles, warmup_iterations

WHAT_IF = (*(field.name for field in dataclasses.fields(WhatIf)), "saved_seconds")
"""Seconds of an iteration as it was and as it would have been."""
UNEXPECTED = 0.3
"""Relative difference of a slowdown from that which was injected, from which the result says so."""


class Measurements:
    """Everything measured so far, one entry per iteration or epoch."""

    def __init__(self, options: TensorParallelOptions, layout: Layout, stragglers: Stragglers | None) -> None:
        self.options = options
        self.layout = layout
        self.stragglers = stragglers
        self.epochs: list[int] = []
        """The epoch of each iteration."""
        self.seconds: list[float] = []
        """Duration of each iteration, from the end of the one before; evaluation excluded."""
        self.loss: list[float] = []
        """Loss of each iteration, the mean over all replicas."""
        self.accuracy: list[float] = []
        """Accuracy on held-out data after each epoch, in [0, 1]."""
        self.records: dict[int, IterationRecord] = {}
        """What the balancer measured, by iteration; single iterations can be missing."""

    def iteration(self, epoch: int, seconds: float) -> None:
        """Add an iteration."""
        self.epochs.append(epoch)
        self.seconds.append(seconds)

    def epoch(self, losses: list[float], accuracy: float, records: list[IterationRecord] | None) -> None:
        """Add what is known at the end of an epoch."""
        self.loss.extend(losses)
        self.accuracy.append(accuracy)
        self.records.update({record.iteration: record for record in records or ()})

    @property
    def warmup_iterations(self) -> int:
        """Number of first iterations that are left out of the medians."""
        return warmup_iterations(len(self.seconds))

    def slowdown(self, rank: int, iteration: int) -> float:
        """The factor by which a rank was made slower in an iteration; 1 if it was not."""
        if self.stragglers is None:
            return 1.0
        by_epoch = self.stragglers.period == "epoch"
        return self.stragglers.slowdown(rank, self.epochs[iteration] if by_epoch else iteration)

    def report(self) -> BalanceReport | None:
        """What balancing did, for the tensor-parallel group whose iterations take longest; None without records."""
        counting = [record for number, record in sorted(self.records.items()) if number >= self.warmup_iterations]
        reports = [report(counting, group) for group in self.layout.tp_groups]
        return max((found for found in reports if found), key=lambda found: found.balanced_seconds, default=None)

    def slowdown_in_words(self) -> str:
        """A sentence if a rank's products took another time than they were made to take; "" if not, or if unknown."""
        stragglers, records = self.stragglers, [each for _, each in sorted(self.records.items())]
        if stragglers is None or stragglers.schedule != "constant" or not records:
            return ""
        latest = records[len(records) // 2 :]
        took = [
            median(each.ranks[rank].equal_matmul_seconds for each in latest) for rank in range(len(records[0].ranks))
        ]
        for group in self.layout.tp_groups:
            fastest = min(took[rank] for rank in group)
            for rank in group:
                made, measured = stragglers.slowdowns.get(rank, 1.0), took[rank] / max(fastest, 1e-9)
                if abs(measured / made - 1.0) > UNEXPECTED:
                    return (
                        f"The products of rank {rank} were made to take {made:g} times as long and took {measured:.1f} "
                        "times as long as the fastest: something else uses this machine, or they are very small."
                    )
        return ""

    def ideal_ratio(self) -> float | None:
        """The smallest possible iteration time with these stragglers / the time without; None where it is unknown.

        It is known without a pipeline, whose stages wait for one another, and if the slow ranks stay in one group.
        """
        groups, stragglers = self.layout.tp_groups, self.stragglers
        if stragglers is None or self.layout.pp > 1 or (len(groups) > 1 and stragglers.schedule != "constant"):
            return None
        slowdowns = [
            {place: stragglers.slowdowns.get(rank, 1.0) for place, rank in enumerate(group)} for group in groups
        ]
        return max(ideal_ratio(by_place, self.layout.tp) for by_place in slowdowns)


def summarize(measurements: Measurements, peak_memory_bytes: list[int]) -> dict[str, Any]:
    """The run as ``--summary`` writes it, schema 1. Seconds, bytes, shares in [0, 1]."""
    seconds = quantiles(measurements.seconds[measurements.warmup_iterations :])
    found = measurements.report()
    names = ("rank", "work_seconds", "matmul_seconds", "wait_seconds", "resized", "migrated", "resharded", "received")
    ideal = measurements.ideal_ratio()
    return {
        "schema": 1,
        "args": measurements.options.as_json(),
        "world_size": measurements.layout.world_size,
        "iterations": len(measurements.seconds),
        "warmup_iterations": measurements.warmup_iterations,
        "iteration_seconds": seconds,
        "samples_per_second": measurements.options.batch_size / seconds["median"],
        "loss": [finite(loss) for loss in measurements.loss],
        "accuracy": measurements.accuracy,
        "peak_memory_bytes": peak_memory_bytes,
        "ranks": [{name: getattr(rank, name) for name in names} for rank in found.ranks] if found else None,
        "bound": {"ideal_ratio": ideal, "measured_ratio": seconds["median"] / found.homogeneous_seconds}
        if found and ideal is not None
        else None,
        "what_if": {name: getattr(found, name) for name in WHAT_IF}
        | {
            "scores": [
                {"rank": rank.rank, "relative": rank.relative_score, "own": rank.own_score} for rank in found.ranks
            ],
            "notes": list(found.notes),
        }
        if found
        else None,
    }
