"""Marks every test by its folder: ``unit``, ``parallel`` (several ranks) or ``example`` (runs a command of a user)."""

from __future__ import annotations

from pathlib import Path

import pytest

# Test modules name Colossal-AI before this package; what comes first here prepares it.
import colossal_hetero.accelerator  # noqa: F401

FOLDER = Path(__file__).parent
MARKERS = {"unit": pytest.mark.unit, "parallel": pytest.mark.parallel, "examples": pytest.mark.example}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(MARKERS[item.path.relative_to(FOLDER).parts[0]])
