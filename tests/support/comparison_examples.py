"""Run the ZeRO or the pipeline example on the ranks of a test. Both compare two ways of training."""

from __future__ import annotations

import importlib
import io
import os
from contextlib import ExitStack, redirect_stdout
from functools import partial
from typing import Any
from unittest.mock import patch

from colossal_hetero.cli import probe_ranks
from colossal_hetero.profiling import device_profiler
from tests.support.harness import run_ranks

MIN_SECONDS = 0.05
"""How long the ZeRO example times each batch size, instead of half a second. The tests look for a slow rank, so they
need times that are roughly right."""
REPEATS = 3
"""How often, at least; other tests time each size fewer times."""
LAYERS_MIN_SECONDS = 0.0
"""How long the pipeline example measures the layers, instead of three seconds. At 0 it measures each of them once."""
WINDOW_SECONDS = 0.02
"""How long the pipeline example measures each rank in each of five windows, instead of 0.3 s."""


def _compare(example: str, lines: list[str]) -> tuple[list[dict[str, Any] | None], str]:
    parse = importlib.import_module(f"examples.{example}.options").parse_options
    module = importlib.import_module(f"examples.{example}.train")
    with ExitStack() as stack:
        # The launcher sets this for ranks of one machine. With it, both ways of training use the same profile.
        stack.enter_context(patch.dict(os.environ, LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"]))
        stack.enter_context(patch.object(device_profiler, "MIN_SECONDS", MIN_SECONDS))
        stack.enter_context(patch.object(device_profiler, "REPEATS", REPEATS))
        stack.enter_context(patch.object(probe_ranks, "WINDOW_SECONDS", WINDOW_SECONDS))
        if example == "pipeline":
            shorter = partial(module.profile_layers, min_seconds=LAYERS_MIN_SECONDS)
            stack.enter_context(patch.object(module, "profile_layers", shorter))
        shown = stack.enter_context(redirect_stdout(io.StringIO()))
        return [module.compare(parse(line.split())) for line in lines], shown.getvalue()


def compared(example: str, ranks: int, *lines: str) -> tuple[list[dict[str, Any]], str]:
    """Run ``example`` ("zero" or "pipeline") once per command line.

    Returns the summaries of rank 0, and the text that it printed.
    """
    (summaries, shown), *others = run_ranks(ranks, _compare, example, list(lines))
    assert all(summary is None for found, _ in others for summary in found) and not any(text for _, text in others)
    return [summary for summary in summaries if summary is not None], shown
