"""The lines that are printed without a terminal while something is measured."""

from __future__ import annotations

import io

from rich.console import Console

from colossal_hetero.profiling.progress import Progress, ProgressDisplay


def display(terminal: bool) -> tuple[ProgressDisplay, io.StringIO, list[float]]:
    text, time = io.StringIO(), [100.0]
    console = Console(file=text, force_terminal=terminal, width=80)
    return ProgressDisplay(console, console.status("building"), now=lambda: time[0]), text, time


PROGRESS = Progress("measuring micro-batches (2 of 4)", 2)


def test_without_a_terminal_a_line_now_and_then() -> None:
    show, text, time = display(terminal=False)
    for second in range(31):
        time[0] = 100.0 + second
        show(PROGRESS)
    assert text.getvalue().splitlines() == ["measuring micro-batches (2 of 4), 2 samples"] * 3


def test_a_short_measurement_is_quiet() -> None:
    show, text, time = display(terminal=False)
    for _ in range(18):
        time[0] += 0.1
        show(PROGRESS)
    assert text.getvalue() == ""
