"""What the ZeRO and the pipeline example share: the same training done in two ways, and the two compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from colossal_hetero.accelerator import get_accelerator

from .options import Options
from .terminal import Terminal, compact_table, finite, peak_memory_by_rank, quantiles, warmup_iterations, write_json


@dataclass
class Training(ABC):
    """One way of training, and what was measured of it."""

    name: str
    seconds: list[float] = field(default_factory=list)
    """Duration of each iteration, evaluation excluded."""
    loss: list[float] = field(default_factory=list)
    """Loss of each iteration, the mean over its global batch."""
    accuracy: list[float] = field(default_factory=list)
    """Accuracy on held-out images after each epoch, in [0, 1]."""
    peak_memory_bytes: list[int] = field(default_factory=list)
    """By rank: the maximum so far in the process."""

    @property
    def settled_seconds(self) -> list[float]:
        """Durations of the iterations that count in medians."""
        return self.seconds[warmup_iterations(len(self.seconds)) :]

    @property
    def iteration_seconds(self) -> float:
        return median(self.settled_seconds)

    @property
    @abstractmethod
    def predicted_seconds(self) -> float:
        """Predicted duration of an iteration."""


T = TypeVar("T", bound=Training)


class ComparisonReport(Terminal, ABC, Generic[T]):
    """Follows both trainings; prints and writes on rank 0.

    A subclass says what the ways to train are called (``WAYS_ARE``) and what is compared (``FITTED``), and shows what
    is particular to them.
    """

    WAYS_ARE: str
    """What the two ways divide: the first column's heading."""
    FITTED: str
    """How the closing sentence begins."""
    FILES: tuple[str, ...]
    """Options that name a file which is written."""

    def __init__(self, options: Any, factors: dict[int, int], quiet: bool = False) -> None:
        self._first = not dist.is_initialized() or dist.get_rank() == 0
        super().__init__(self._first and not quiet, "{task.description}", "{task.fields[rate]:.1f} it/s")
        self._options: Options | Any = options
        self.factors = factors
        """How many times as long each slow rank's work takes, by rank."""
        self.trainings: list[T] = []
        self.means = "repeat"

    def start(self, model: str, data: str, means: str, more: str = "") -> None:
        """Print what is going to happen; ``means`` is how ranks are slowed, ``more`` is added to the first line."""
        self.means = means
        device = get_accelerator().get_current_device()
        self._console.print(f"{model}, {self._options.precision} on {device}{more}")
        self._console.print(data)
        how = "by a CPU quota" if means == "quota" else "by repeated passes"
        slowed = ", ".join(f"rank {rank} slowed × {factor}" for rank, factor in self.factors.items())
        self._console.print(f"{slowed} {how}" if slowed else "No rank slowed")

    @contextmanager
    def training(self, training: T, title: str, iterations: int) -> Iterator[None]:
        """Show the progress of ``training`` while the block runs. Collective over all ranks."""
        self._console.print(title, markup=False)
        self._iterations = iterations
        self._task = self._progress.add_task(training.name, total=iterations, rate=0.0)
        self._progress.start()
        self.trainings.append(training)
        yield
        self._progress.remove_task(self._task)
        training.peak_memory_bytes = peak_memory_by_rank()

    def iteration(self, seconds: float) -> None:
        """An iteration is over."""
        self.trainings[-1].seconds.append(seconds)
        self._progress.update(self._task, advance=1, rate=1.0 / max(seconds, 1e-9))
        self.is_at(len(self.trainings[-1].seconds), self._iterations)

    def epoch(self, epoch: int, losses: Sequence[float], accuracy: float, more: str = "") -> None:
        """An epoch is over; ``more`` is added to its line."""
        training, epochs = self.trainings[-1], self._options.epochs
        training.loss.extend(losses)
        training.accuracy.append(accuracy)
        self.line(
            f"  epoch {epoch + 1:>{len(str(epochs))}}/{epochs}  loss {mean(losses):.3f}  accuracy {accuracy:6.1%}  "
            f"{median(training.seconds[-len(losses) :]) * 1e3:.0f} ms per iteration{more}"
        )

    def finish(self) -> dict[str, Any] | None:
        """Write the summary and print the tables; the summary on rank 0, None elsewhere."""
        if not self._first:
            return None
        summary = self._summarize()
        if self._options.summary is not None:
            write_json(summary, self._options.summary)
        self._console.print(self._rank_table())
        self._console.print(self._comparison_table())
        if summary["speedup"] is not None:
            ratio = summary["speedup"]
            fast = f"train {ratio:.2f} times as fast" if ratio >= 1 else f"take {1 / ratio:.2f} times as long"
            self._console.print(
                f"{self.FITTED} {fast} as equal ones, on the same images to the same losses (largest difference "
                f"{self._largest_loss_difference():.1e})."
            )
        self.print_files(self._options, *self.FILES)
        return summary

    def _summarize(self) -> dict[str, Any]:
        """The run as ``--summary`` writes it, schema 1. Seconds, bytes, shares in [0, 1]."""
        both = len(self.trainings) == 2
        took = [training.iteration_seconds for training in self.trainings]
        slowed = {"ranks": {str(rank): factor for rank, factor in self.factors.items()}, "means": self.means}
        return {
            "schema": 1,
            "args": self._options.as_json(),
            "world_size": len(self.trainings[0].peak_memory_bytes),
            "slowed": slowed if self.factors else None,
            **self._summary_of_run(),
            "trainings": [self._summary_of(training) for training in self.trainings],
            "speedup": took[0] / took[1] if both else None,
            "largest_loss_difference": finite(self._largest_loss_difference()) if both else None,
        }

    def _summary_of_run(self) -> dict[str, Any]:
        """Fields of the summary beside those of every comparison."""
        return {}

    def _summary_of(self, training: T) -> dict[str, Any]:
        """A training's part of the summary; a subclass adds to it."""
        return {
            "iterations": len(training.seconds),
            "iteration_seconds": quantiles(training.settled_seconds) | {"predicted": training.predicted_seconds},
            "samples_per_second": self._options.global_batch / training.iteration_seconds,
            "loss": [finite(loss) for loss in training.loss],
            "accuracy": training.accuracy,
        }

    def _largest_loss_difference(self) -> float:
        first, second = (training.loss for training in self.trainings)
        return max(abs(one - other) for one, other in zip(first, second, strict=True))

    @property
    def _slowed_heading(self) -> list[str]:
        """The heading of a column with the factors by which ranks are slowed, if any is."""
        return ["slowed"] if self.factors else []

    def _slowed(self, rank: int) -> list[str]:
        """The cell of that column."""
        return [f"× {self.factors[rank]}" if rank in self.factors else ""] if self.factors else []

    @abstractmethod
    def _rank_table(self) -> Any:
        """What each rank did."""

    def _comparison_table(self) -> Any:
        columns = ("ms per iteration", "predicted ms", "it/s", "images/s", "loss", "accuracy")
        table = compact_table("Both ways" if len(self.trainings) > 1 else "In total", self.WAYS_ARE, *columns)
        for training in self.trainings:
            took = training.iteration_seconds
            last = training.loss[-(len(training.loss) // len(training.accuracy)) :]
            table.add_row(
                training.name,
                f"{took * 1e3:.0f}",
                f"{training.predicted_seconds * 1e3:.0f}",
                f"{1 / took:.2f}",
                f"{self._options.global_batch / took:.0f}",
                f"{mean(last):.3f}",
                f"{training.accuracy[-1]:.1%}",
            )
        return table
