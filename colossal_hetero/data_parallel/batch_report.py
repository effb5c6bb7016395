"""How global batches are divided, for people and for loggers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..common.text import count, duration, numbers_of, times


@dataclass(frozen=True)
class BatchShare:
    """A rank's or replica's part of a global batch. Times are in seconds."""

    number: int
    device: str
    samples: int
    micro_batches: tuple[int, ...]
    """Samples of each micro-batch, in running order."""
    slowdown: float
    """Time of its passes relative to that in the profile, or of replicas relative to the fastest."""
    work_seconds: float
    data_seconds: float
    """Time for which it waits for its data."""
    wait_seconds: float
    """The rest of an iteration: waiting for slower ones, and communication."""

    def in_words(self) -> str:
        """Micro-batches in short, such as ``26 × 2`` or ``7 × 3 + 6``."""
        runs = ((size, len(list(same))) for size, same in groupby(self.micro_batches))
        return " + ".join(f"{size} × {number}" if number > 1 else str(size) for size, number in runs)


@dataclass(frozen=True)
class BatchReport:
    """How global batches are divided."""

    of: str
    """"rank" or "replica"."""
    global_batch_size: int
    shares: tuple[BatchShare, ...]
    iteration_seconds: float
    """Predicted time of a global batch, with communication."""
    equal_seconds: float | None
    """The same if all had equal parts; None if that is not possible."""
    changes: int
    """How often batches were divided again."""
    is_measured: bool
    """True if ``work_seconds`` are those of training with this division; otherwise they are predicted."""

    def shown(self) -> Iterator[RenderableType]:
        yield batch_table(self)
        yield Text(batches_in_words(self))

    def numbers(self) -> dict[str, float]:
        """All numbers by flat names, such as ``rank1/samples``."""
        found = numbers_of(self)
        for share in self.shares:
            name = f"{self.of}{share.number}"
            found |= numbers_of(share, f"{name}/") | {f"{name}/micro_batches": len(share.micro_batches)}
        return found


def batch_table(report: BatchReport) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, title_justify="left")
    source = "measured" if report.is_measured else "predicted"
    unit, work, wait = times(
        *([getattr(each, name) for each in report.shares] for name in ("work_seconds", "wait_seconds"))
    )
    table.title = f"A global batch of {report.global_batch_size}, by {report.of} (times in {unit}, {source})"
    table.add_column(report.of)
    for heading in ("samples", "micro-batches", "work", "wait", "slowdown"):
        table.add_column(heading, justify="right")
    for each, worked, waited in zip(report.shares, work, wait, strict=True):
        table.add_row(str(each.number), str(each.samples), each.in_words(), worked, waited, f"{each.slowdown:.2f}")
    return table


def batches_in_words(report: BatchReport) -> str:
    words = f"A global batch takes {duration(report.iteration_seconds)} by these times"
    if report.equal_seconds is not None:
        ratio = report.equal_seconds / report.iteration_seconds
        words += f", and with equal parts {duration(report.equal_seconds)} ({ratio:.2f} times as long)"
    return f"{words}. It was divided again {count(report.changes, 'time')}."
