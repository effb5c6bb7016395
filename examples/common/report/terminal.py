"""The terminal of an example: rank 0 prints and shows a progress bar; the other ranks are silent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track
from rich.table import Table

__all__ = ["Terminal", "compact_table"]


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
