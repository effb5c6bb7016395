"""What came of training in each way: what a user sees, and the summary. Rank 0 only."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import numpy as np
from data import DataInfo
from rich.box import SIMPLE_HEAD
from rich.table import Table
from settings import Settings
from small_vit import describe_vit
from terminal import Terminal

from colossal_hetero.planner.plans.plan import Plan
from colossal_hetero.planner.report.plan_table import one_line

__all__ = ["Display", "Training", "json_text", "summarize"]

WARMUP_ITERATIONS = 5
"""First iterations that do not count in medians, and never more than a quarter of the run."""


@dataclass
class Training:
    """One way of training and what was measured of it."""

    way: str
    plan: Plan
    seconds: list[float] = field(default_factory=list)
    """Of each iteration, evaluation left out."""
    loss: list[float] = field(default_factory=list)
    """Of each iteration: the mean over its global batch."""
    accuracy: list[float] = field(default_factory=list)
    """On held-out images, after each epoch."""
    peak_memory_bytes: list[int] = field(default_factory=list)
    """By rank, so far in the process."""

    @property
    def settled_seconds(self) -> list[float]:
        """Iterations that count."""
        return self.seconds[min(WARMUP_ITERATIONS, len(self.seconds) // 4) :]

    @property
    def iteration_seconds(self) -> float:
        return median(self.settled_seconds)


def summarize(
    settings: Settings, trainings: Sequence[Training], slow: dict[int, int], means: str, profile_seconds: float
) -> dict[str, Any]:
    """The run as ``--summary`` writes it, schema 1. Seconds, bytes, shares in [0, 1]."""
    took = {training.way: training.iteration_seconds for training in trainings}
    return {
        "schema": 1,
        "args": settings.as_json(),
        "world_size": trainings[0].plan.world_size,
        "slowed": {"ranks": {str(rank): times for rank, times in slow.items()}, "means": means} if slow else None,
        "profile_seconds": profile_seconds,
        "trainings": [_summary(training, settings) for training in trainings],
        "speedup": took["uniform"] / took["planned"] if len(took) == 2 else None,
        "largest_loss_difference": _finite(_largest_difference(trainings)) if len(took) == 2 else None,
    }


def _summary(training: Training, settings: Settings) -> dict[str, Any]:
    seconds = training.settled_seconds
    return {
        "way": training.way,
        "layout": one_line(training.plan),
        "iterations": len(training.seconds),
        "iteration_seconds": {
            "median": training.iteration_seconds,
            "p10": float(np.percentile(seconds, 10)),
            "p90": float(np.percentile(seconds, 90)),
            "predicted": training.plan.iteration_seconds,
        },
        "samples_per_second": settings.global_batch / training.iteration_seconds,
        "stages": [
            {
                "rank": stage.ranks[0],
                "blocks": list(stage.blocks),
                "predicted_seconds_per_micro_batch": stage.forward_seconds + stage.backward_seconds,
                "peak_memory_bytes": training.peak_memory_bytes[stage.ranks[0]],
            }
            for stage in training.plan.replicas[0].stages
        ],
        "loss": [_finite(loss) for loss in training.loss],
        "accuracy": training.accuracy,
    }


def _largest_difference(trainings: Sequence[Training]) -> float:
    first, second = (np.array(training.loss) for training in trainings)
    return float(np.abs(first - second).max())


def _finite(value: float) -> float | None:
    """JSON has no infinities."""
    return value if math.isfinite(value) else None


def json_text(summary: dict[str, Any]) -> str:
    """The summary's file."""
    return json.dumps(summary, indent=2, allow_nan=False) + "\n"


class Display(Terminal):
    """The terminal; silent unless ``visible``."""

    def __init__(self, settings: Settings, visible: bool) -> None:
        self._settings = settings
        super().__init__(visible, "{task.description}", "{task.fields[rate]:.1f} it/s")

    def __enter__(self) -> Display:
        return self

    def start(self, data: DataInfo, parameters: int, device: Any, slow: dict[int, int], means: str) -> None:
        """Say what is going to happen."""
        settings = self._settings
        self._console.print(f"{describe_vit(settings, parameters)}, {settings.precision} on {device}")
        self._console.print(
            f"{settings.data}: {data.train_images} images to train on, {data.test_images} held out, "
            f"{data.classes} classes; {settings.global_batch} per iteration, {settings.micro_batch} at a time"
        )
        how = "by a CPU quota" if means == "quota" else "by repeated passes"
        slowed = ", ".join(f"rank {rank} slowed × {times}" for rank, times in slow.items())
        self._console.print(f"{slowed} {how}" if slow else "Nobody slowed")

    def profiled(self, seconds: float, block_seconds: Sequence[float]) -> None:
        """The layers have been measured, or read from a file."""
        blocks = ", ".join(f"{own * 1e3:.1f} ms on rank {rank}" for rank, own in enumerate(block_seconds))
        self._console.print(f"Layers measured ({seconds:.1f} s): a block takes {blocks}")

    def begin(self, training: Training, iterations: int) -> None:
        """A way of training begins."""
        self._console.print(f"{training.way}: {one_line(training.plan)}", markup=False)
        self._task = self._progress.add_task(training.way, total=iterations, rate=0.0)
        self._progress.start()

    def iteration(self, seconds: float) -> None:
        """An iteration is over."""
        self._progress.update(self._task, advance=1, rate=1.0 / max(seconds, 1e-9))

    def epoch(self, epoch: int, training: Training) -> None:
        """An epoch is over."""
        count = len(training.seconds) // (epoch + 1)
        epochs = self._settings.epochs
        self._console.print(
            f"  epoch {epoch + 1:>{len(str(epochs))}}/{epochs}  loss {mean(training.loss[-count:]):.3f}  "
            f"accuracy {training.accuracy[-1]:6.1%}  {median(training.seconds[-count:]) * 1e3:.0f} ms per iteration"
        )
        if epoch + 1 == epochs:
            self._progress.remove_task(self._task)

    def report(self, trainings: Sequence[Training], slow: dict[int, int], summary: dict[str, Any]) -> None:
        """Say what each stage was given, and what came of it."""
        self._console.print(_stage_table(trainings, slow))
        self._console.print(_comparison_table(trainings, self._settings.global_batch))
        if summary["speedup"] is not None:
            self._console.print(
                f"Stages that fit the devices train {summary['speedup']:.2f} times as fast as equal ones, on the same "
                f"images to the same losses (largest difference {_largest_difference(trainings):.1e})."
            )
        for what in ("summary", "profile", "plan", "plot"):
            if (path := getattr(self._settings, what)) is not None:
                self._console.print(f"{what.capitalize()}: {path}", soft_wrap=True)


def _compact(title: str, *left: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for heading in left:
        table.add_column(heading)
    return table


def _stage_table(trainings: Sequence[Training], slow: dict[int, int]) -> Table:
    table = _compact("Stages, times of a micro-batch as predicted (in ms)", "stages")
    for heading in ("stage", "rank", *(["slowed"] if slow else []), "blocks", "forward", "backward", "communication"):
        table.add_column(heading, justify="right")
    for training in trainings:
        for number, stage in enumerate(training.plan.replicas[0].stages):
            rank = stage.ranks[0]
            times = (stage.forward_seconds, stage.backward_seconds, stage.transfer_seconds)
            table.add_row(
                training.way if number == 0 else "",
                str(number),
                str(rank),
                *([f"× {slow[rank]}" if rank in slow else ""] if slow else []),
                f"{stage.blocks[0]}-{stage.blocks[1] - 1}",
                *(f"{seconds * 1e3:.1f}" for seconds in times),
            )
    return table


def _comparison_table(trainings: Sequence[Training], global_batch: int) -> Table:
    table = _compact("Both ways" if len(trainings) > 1 else "In all", "stages")
    for heading in ("ms per iteration", "predicted", "it/s", "images/s", "loss", "accuracy"):
        table.add_column(heading, justify="right")
    for training in trainings:
        took = training.iteration_seconds
        last = training.loss[-(len(training.loss) // len(training.accuracy)) :]
        table.add_row(
            training.way,
            f"{took * 1e3:.0f}",
            f"{training.plan.iteration_seconds * 1e3:.0f}",
            f"{1 / took:.2f}",
            f"{global_batch / took:.0f}",
            f"{mean(last):.3f}",
            f"{training.accuracy[-1]:.1%}",
        )
    return table
