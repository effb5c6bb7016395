"""What a run prints, on rank 0 only, and values that all summaries share."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track
from rich.table import Table

from colossal_hetero.accelerator import get_accelerator
from colossal_hetero.common.atomic_files import replacing

WARMUP_ITERATIONS = 5
SILENT_SECONDS = 10.0
"""Where there is no terminal for a progress bar, a line says how far training is after so long without another one."""


def warmup_iterations(iterations: int) -> int:
    """First iterations that do not count in medians (allocation, caches, no plan yet): at most a quarter of the run."""
    return min(WARMUP_ITERATIONS, iterations // 4)


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and first and last decile."""
    deciles = {name: float(np.percentile(seconds, percent)) for name, percent in (("p10", 10), ("p90", 90))}
    return {"median": median(seconds), **deciles}


def peak_memory_by_rank() -> list[int]:
    """The most bytes that each rank's process has allocated so far. Collective over all ranks."""
    peaks = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, int(get_accelerator().max_memory_allocated()))
    return peaks


def finite(value: float) -> float | None:
    """``value``, or None if it is infinite or not a number, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def write_json(value: Any, path: Path, indent: int | None = 2) -> None:
    """Write ``value`` to ``path`` at once: a reader sees the old file or the complete new one."""
    with replacing(path) as draft:
        draft.write_text(json.dumps(value, indent=indent) + "\n")


class Terminal(AbstractContextManager[Any]):
    """Silent unless ``visible``.

    Args:
        visible: True on one rank.
        before: text to the left of the progress bar, with fields of its task; ``after``: text to the right.
    """

    def __init__(self, visible: bool, before: str, after: str) -> None:
        self._visible = visible
        self._console = Console(quiet=not visible, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn(before),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn(after),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not visible or not self._console.is_terminal,
        )

        self._lines_at = time.monotonic()

    def line(self, words: str) -> None:
        """Print a line."""
        self._console.print(words, markup=False)
        self._lines_at = time.monotonic()

    def is_at(self, done: int, total: int) -> None:
        """So many of all iterations are done; said where no progress bar shows it."""
        if not self._console.is_terminal and time.monotonic() - self._lines_at > SILENT_SECONDS:
            self.line(f"  {done} of {total} iterations")

    def track(self, items: Sequence[Any], what: str) -> Iterator[Any]:
        """Yield ``items``, and show how many have been taken."""
        if not (self._visible and self._console.is_terminal):
            yield from items
        else:
            yield from track(items, what, console=self._console, transient=True)

    def print_files(self, options: Any, *names: str) -> None:
        """Print the paths of these options that are given: files that were written."""
        for name in names:
            if (path := getattr(options, name)) is not None:
                self._console.print(f"{name.capitalize().replace('_', ' ')}: {path}", soft_wrap=True)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def compact_table(title: str, left: str, *right: str) -> Table:
    """A table with a left-aligned column ``left`` and right-aligned columns ``right``."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column(left)
    for heading in right:
        table.add_column(heading, justify="right")
    return table
