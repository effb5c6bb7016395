"""The terminal of an example: one rank's, with a bar of progress; the others are silent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track

__all__ = ["Terminal"]


class Terminal(AbstractContextManager["Terminal"]):
    """Silent unless ``visible``.

    Args:
        visible: on one rank.
        before: what stands before the bar, with the fields of a task; ``after``: what stands behind it.
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
        """Pass ``items`` on and show how many have been."""
        if not (self._visible and self._console.is_terminal):
            yield from items
        else:
            yield from track(items, what, console=self._console, transient=True)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
