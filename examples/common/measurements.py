"""What a run with tensor parallelism measured, its summary, and files that hold single iterations. Rank 0 only."""

from __future__ import annotations

import dataclasses
import json
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from colossal_hetero.balance.report import BalanceReport, IterationRecord, WhatIf, ideal_ratio, report, what_if
from colossal_hetero.testing.stragglers import Stragglers

from .tensor_parallel import Layout, TensorParallelOptions
from .terminal import finite, quantiles, warmup_iterations

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

    def what_if(self, iteration: int) -> WhatIf | None:
        """An iteration as it was and as it would have been, for the group that took longest in it."""
        record = self.records.get(iteration)
        if record is None:
            return None
        return max((what_if(record, group) for group in self.layout.tp_groups), key=lambda it: it.balanced_seconds)

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
        "what_if": what_if_json(found)
        | {
            "scores": [
                {"rank": rank.rank, "relative": rank.relative_score, "own": rank.own_score} for rank in found.ranks
            ],
            "notes": list(found.notes),
        }
        if found
        else None,
    }


def what_if_json(found: WhatIf) -> dict[str, float]:
    """An iteration as it was and as it would have been, in seconds, by name."""
    names = [field.name for field in dataclasses.fields(WhatIf)] + ["saved_seconds"]
    return {name: getattr(found, name) for name in names}


# Files of iterations -------------------------------------------------------------------------------------------------


RANK_VALUES = (
    *("work_seconds", "matmul_seconds", "wait_seconds", "resized", "migrated", "resharded", "received"),
    *("relative_score", "own_score"),
)
"""What is logged about a rank in an iteration."""

TRACED_RANK_VALUES = (
    *("rank", "communication_seconds", "block_seconds", "equal_work_seconds", "equal_matmul_seconds"),
    *RANK_VALUES,
)


class TraceFile(AbstractContextManager["TraceFile"]):
    """A JSON line per iteration with all that was measured and decided in it."""

    def __init__(self, path: Path | None, measurements: Measurements) -> None:
        self._measurements = measurements
        self._file: TextIO | None = None if path is None else path.open("w")
        self._written = 0

    def write(self) -> None:
        """Add the iterations since the last call."""
        if self._file is None:
            return
        for iteration in range(self._written, len(self._measurements.loss)):
            self._file.write(json.dumps(self._line(iteration)) + "\n")
        self._written = len(self._measurements.loss)
        self._file.flush()

    def _line(self, iteration: int) -> dict[str, Any]:
        measured = self._measurements
        record = measured.records.get(iteration)
        found = measured.what_if(iteration)
        return {
            "iteration": iteration,
            "epoch": measured.epochs[iteration],
            "seconds": measured.seconds[iteration],
            "loss": finite(measured.loss[iteration]),
            "exchanged": record.exchanged if record else None,
            "plan_changed": record.plan_changed if record else None,
            "note": record.note if record else None,
            "what_if": what_if_json(found) if found else None,
            "ranks": [
                {name: getattr(rank, name) for name in TRACED_RANK_VALUES}
                | {"slowdown": measured.slowdown(rank.rank, iteration)}
                for rank in record.ranks
            ]
            if record
            else None,
        }

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


class TensorBoardLog(AbstractContextManager["TensorBoardLog"]):
    """Loss, accuracy, and times, shares and scores by rank, for TensorBoard."""

    def __init__(self, directory: Path | None, measurements: Measurements) -> None:
        self._measurements = measurements
        self._writer: Any = None
        self._written = 0
        if directory is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(directory))

    def write(self, epoch: int) -> None:
        """Add the iterations since the last call, and the epoch's accuracy."""
        if self._writer is None:
            return
        measured = self._measurements
        for iteration in range(self._written, len(measured.loss)):
            self._writer.add_scalar("loss", measured.loss[iteration], iteration)
            self._writer.add_scalar("iteration_seconds", measured.seconds[iteration], iteration)
            record = measured.records.get(iteration)
            for rank in record.ranks if record else ():
                for name in RANK_VALUES:
                    self._writer.add_scalar(f"{name}/rank{rank.rank}", getattr(rank, name), iteration)
        self._written = len(measured.loss)
        self._writer.add_scalar("accuracy", measured.accuracy[-1], epoch)
        self._writer.flush()

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
