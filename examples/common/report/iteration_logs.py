"""Files that hold single iterations: the trace, the log for TensorBoard, and timelines. Rank 0 only."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from colossal_hetero.balance.timeline import Timelines, chrome_trace, plot_timelines

from .measurements import Measurements, what_if_json
from .summary_file import finite, write_json

__all__ = ["TensorBoardLog", "TraceFile", "write_timelines"]

RANK_VALUES = (
    *("work_seconds", "matmul_seconds", "wait_seconds", "resized", "migrated", "resharded", "received"),
    *("relative_score", "own_score"),
)
"""What is logged about a rank in an iteration."""

TRACED_RANK_VALUES = (
    *("rank", "communication_seconds", "block_seconds", "equal_work_seconds", "equal_matmul_seconds"),
    *RANK_VALUES,
)


def write_timelines(timelines: Timelines | None, plot: Path | None, trace: Path | None) -> None:
    """Write the files of ``--plot`` and ``--chrome-trace`` that are asked for, if there are timelines."""
    if timelines is None:
        return
    before, after = timelines
    if plot is not None:
        plot_timelines(before, after, plot)
    if trace is not None:
        titled = {"latest": before} if after is None else {"before balancing": before, "after": after}
        write_json(chrome_trace(titled), trace, indent=None)


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
