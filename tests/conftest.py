"""Marks every test by its folder: ``unit``, ``parallel`` (several ranks) or ``example`` (runs a command of a user)."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

FOLDER = Path(__file__).parent
MARKERS = {"unit": pytest.mark.unit, "parallel": pytest.mark.parallel, "examples": pytest.mark.example}

# How long an example takes depends on what else the machine does, so it has no deadline. The thorough profile runs
# ten times as many examples where a test does not name a number.
settings.register_profile("ordinary", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ordinary"))


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Prepare Colossal-AI, which test modules import first. The process that only hands tests to others skips it."""
    import colossal_hetero.accelerator  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(MARKERS[item.path.relative_to(FOLDER).parts[0]])


def pytest_collection_finish() -> None:
    """Leave what is loaded now out of garbage collections, each of which would take a third of a second."""
    gc.collect()
    gc.freeze()
