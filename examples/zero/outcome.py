"""What came of training in each way: what a user sees, and the summary. Rank 0 only."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from choices import Choices
from data import DataInfo
from rich.box import SIMPLE_HEAD
from rich.table import Table
from small_vit import describe_vit
from terminal import Terminal

from colossal_hetero.planner.batches.allocation import Allocation, Share

__all__ = ["Display", "Training", "json_text", "summarize"]

WARMUP_ITERATIONS = 5
"""First iterations that do not count in medians, and never more than a quarter of the run."""


@dataclass
class Training:
    """One way of training and what was measured of it."""

    method: str
    stage: int
    """Of ZeRO, also where the user left it open."""
    boost_seconds: float
    """Until training could begin; with measuring the devices, where nobody had."""
    seconds: list[float] = field(default_factory=list)
    """Of each iteration, evaluation left out."""
    loss: list[float] = field(default_factory=list)
    """Of each iteration: the mean over its global batch."""
    accuracy: list[float] = field(default_factory=list)
    """On held-out images, after each epoch."""
    allocations: list[Allocation] = field(default_factory=list)
    """How global batches were divided, as each epoch began."""
    reallocations: int = 0
    peak_memory_bytes: list[int] = field(default_factory=list)
    """By rank, so far in the process."""

    @property
    def allocation(self) -> Allocation:
        """The latest."""
        return self.allocations[-1]

    @property
    def settled_seconds(self) -> list[float]:
        """Iterations that count: after warm-up, since batches were divided last."""
        latest = self.allocation.shares
        same = 0
        for allocation in reversed(self.allocations):
            if allocation.shares != latest:
                break
            same += 1
        first = (len(self.allocations) - same) * (len(self.seconds) // len(self.allocations))
        return self.seconds[max(first, min(WARMUP_ITERATIONS, len(self.seconds) // 4)) :]

    @property
    def iteration_seconds(self) -> float:
        return median(self.settled_seconds)

    @property
    def wait_seconds(self) -> list[float]:
        """What an iteration took beyond the rank's own computing: waiting for others, and communication."""
        return [max(0.0, self.iteration_seconds - busy) for busy in self.allocation.busy_seconds]


def summarize(choices: Choices, trainings: Sequence[Training], slow: dict[int, int], means: str) -> dict[str, Any]:
    """The run as ``--summary`` writes it, schema 1. Seconds, bytes, shares in [0, 1]."""
    took = {training.method: training.iteration_seconds for training in trainings}
    return {
        "schema": 1,
        "args": choices.as_json(),
        "world_size": len(trainings[0].allocation.shares),
        "slowed": {"ranks": {str(rank): times for rank, times in slow.items()}, "means": means} if slow else None,
        "trainings": [_summary(training, choices) for training in trainings],
        "speedup": took["uniform"] / took["exact"] if len(took) == 2 else None,
        "largest_loss_difference": _finite(_largest_difference(trainings)) if len(took) == 2 else None,
    }


def _summary(training: Training, choices: Choices) -> dict[str, Any]:
    allocation, seconds = training.allocation, training.settled_seconds
    return {
        "method": training.method,
        "stage": training.stage,
        "boost_seconds": training.boost_seconds,
        "iterations": len(training.seconds),
        "iteration_seconds": {
            "median": training.iteration_seconds,
            "p10": float(np.percentile(seconds, 10)),
            "p90": float(np.percentile(seconds, 90)),
            "predicted": allocation.wall_seconds,
        },
        "samples_per_second": choices.global_batch / training.iteration_seconds,
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
        "loss": [_finite(loss) for loss in training.loss],
        "accuracy": training.accuracy,
    }


def _largest_difference(trainings: Sequence[Training]) -> float:
    first, second = (training.loss for training in trainings)
    return max(abs(one - other) for one, other in zip(first, second, strict=True))


def _finite(loss: float) -> float | None:
    """JSON has no number for a loss that is infinite or not a number."""
    return loss if math.isfinite(loss) else None


def json_text(summary: dict[str, Any]) -> str:
    """The summary as its file holds it."""
    return json.dumps(summary, indent=2, allow_nan=False) + "\n"


class Display(Terminal):
    """The terminal; silent unless ``visible``."""

    def __init__(self, choices: Choices, visible: bool) -> None:
        self._choices = choices
        super().__init__(visible, "{task.description}", "{task.fields[rate]:.1f} it/s")

    def __enter__(self) -> Display:
        return self

    def start(self, data: DataInfo, parameters: int, device: Any, stage: int, slow: dict[int, int], means: str) -> None:
        """Say what is going to happen."""
        choices = self._choices
        self._console.print(f"{describe_vit(choices, parameters)}, {choices.precision} on {device}, ZeRO stage {stage}")
        self._console.print(
            f"{choices.data}: {data.train_images} images to train on, {data.test_images} held out, "
            f"{data.classes} classes; {choices.global_batch} per iteration"
        )
        how = "by a CPU quota" if means == "quota" else "by repeated passes"
        slowed = ", ".join(f"rank {rank} slowed × {times}" for rank, times in slow.items())
        self._console.print(f"{slowed} {how}" if slow else "Nobody slowed")

    def begin(self, training: Training, iterations: int) -> None:
        """A way of training begins."""
        self._console.print(f"{training.method} (ready after {training.boost_seconds:.1f} s)")
        self._task = self._progress.add_task(training.method, total=iterations, rate=0.0)
        self._progress.start()

    def iteration(self, seconds: float) -> None:
        """An iteration is over."""
        self._progress.update(self._task, advance=1, rate=1.0 / max(seconds, 1e-9))

    def epoch(self, epoch: int, training: Training) -> None:
        """An epoch is over."""
        count = len(training.seconds) // (epoch + 1)
        epochs = self._choices.epochs
        samples = " + ".join(str(share.samples) for share in training.allocation.shares)
        self._console.print(
            f"  epoch {epoch + 1:>{len(str(epochs))}}/{epochs}  loss {sum(training.loss[-count:]) / count:.3f}  "
            f"accuracy {training.accuracy[-1]:6.1%}  {median(training.seconds[-count:]) * 1e3:.0f} ms per iteration  "
            f"images by rank {samples}"
        )
        if epoch + 1 == epochs:
            self._progress.remove_task(self._task)

    def report(self, trainings: Sequence[Training], slow: dict[int, int], summary: dict[str, Any]) -> None:
        """Say what each rank did, and what came of it."""
        self._console.print(_rank_table(trainings, slow))
        self._console.print(_comparison_table(trainings, self._choices.global_batch))
        if summary["speedup"] is not None:
            self._console.print(
                f"Batches that fit the devices train {summary['speedup']:.2f} times as fast as equal ones, on the same "
                f"images to the same losses (largest difference {_largest_difference(trainings):.1e})."
            )
        for what in ("summary", "profile"):
            if (path := getattr(self._choices, what)) is not None:
                self._console.print(f"{what.capitalize()}: {path}", soft_wrap=True)


def _compact(title: str, *left: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for heading in left:
        table.add_column(heading)
    return table


def _rank_table(trainings: Sequence[Training], slow: dict[int, int]) -> Table:
    table = _compact("An iteration, by rank (times in ms)", "batches")
    for heading in ("rank", *(["slowed"] if slow else []), "images", "micro-batches", "busy", "wait"):
        table.add_column(heading, justify="right")
    for training in trainings:
        for rank, share in enumerate(training.allocation.shares):
            times = (training.allocation.busy_seconds[rank], training.wait_seconds[rank])
            table.add_row(
                training.method if rank == 0 else "",
                str(rank),
                *([f"× {slow[rank]}" if rank in slow else ""] if slow else []),
                str(share.samples),
                _in_words(share),
                *(f"{seconds * 1e3:.0f}" for seconds in times),
            )
    return table


def _in_words(share: Share) -> str:
    """For example ``26 × 2`` or ``7 × 3 + 6``."""
    return " + ".join(f"{size} × {count}" if count > 1 else str(size) for size, count in share.runs)


def _comparison_table(trainings: Sequence[Training], global_batch: int) -> Table:
    table = _compact("Both ways" if len(trainings) > 1 else "In all", "batches")
    for heading in ("ms per iteration", "predicted", "it/s", "images/s", "loss", "accuracy"):
        table.add_column(heading, justify="right")
    for training in trainings:
        took = training.iteration_seconds
        last = training.loss[-(len(training.loss) // len(training.accuracy)) :]
        table.add_row(
            training.method,
            f"{took * 1e3:.0f}",
            f"{training.allocation.wall_seconds * 1e3:.0f}",
            f"{1 / took:.2f}",
            f"{global_batch / took:.0f}",
            f"{sum(last) / len(last):.3f}",
            f"{training.accuracy[-1]:.1%}",
        )
    return table
