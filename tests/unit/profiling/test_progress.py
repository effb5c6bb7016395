"""The estimate of how long a measurement of layers still takes, and the lines that are printed without a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from colossal_hetero.profiling.progress import Progress, ProgressDisplay, layer_seconds_left


@pytest.mark.parametrize(
    ("rounds", "measured", "expected"),
    [
        # Two rounds warm up and five are measured, of 2 s with 1 sample and 8 s with 4 samples.
        (1, 0.0, 6 * 2 + 7 * 8),
        (2, 0.0, 5 * 2 + 7 * 8),
        (6, 8.0, 2 + 7 * 8),
    ],
)
def test_long_rounds_take_the_fewest_rounds(rounds: int, measured: float, expected: float) -> None:
    assert layer_seconds_left([1, 4], 0, rounds, measured, 2.0, 3.0) == pytest.approx(expected)


def test_short_rounds_take_the_shortest_time() -> None:
    assert layer_seconds_left([1, 4], 0, 1, 0.0, 0.01, 3.0) == pytest.approx(0.01 + 3 + 0.08 + 3)
    assert layer_seconds_left([1, 4], 0, 102, 1.0, 0.01, 3.0) == pytest.approx(2 + 0.08 + 3)
    assert layer_seconds_left([1, 4], 1, 300, 3.0, 0.04, 3.0) == 0


def display(terminal: bool) -> tuple[ProgressDisplay, io.StringIO, list[float]]:
    text, time = io.StringIO(), [100.0]
    console = Console(file=text, force_terminal=terminal, width=80)
    return ProgressDisplay(console, console.status("building"), now=lambda: time[0]), text, time


def progress(left: float | None) -> Progress:
    return Progress("measuring micro-batches (2 of 4)", 2, left)


def test_without_a_terminal_a_line_now_and_then() -> None:
    show, text, time = display(terminal=False)
    for second in range(31):
        time[0] = 100.0 + second
        show(progress(None if second < 4 else 160.5 - 2 * second))
    assert text.getvalue().splitlines() == [
        "measuring micro-batches (2 of 4), 2 samples, about 3 min left",
        "measuring micro-batches (2 of 4), 2 samples, about 3 min left",
        "measuring micro-batches (2 of 4), 2 samples, about 2 min left",
    ]
    time[0] += 10.0
    show(progress(0.3))
    assert text.getvalue().endswith("about 1 s left\n")


def test_a_short_measurement_is_quiet() -> None:
    show, text, time = display(terminal=False)
    for _ in range(18):
        time[0] += 0.1
        show(progress(1.0))
    assert text.getvalue() == ""
