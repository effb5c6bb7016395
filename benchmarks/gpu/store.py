"""The results of the suite so far: one JSON file for each part, written after each case."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from colossal_hetero.common.files import write_json

__all__ = ["CaseResult", "PartResults", "load_results"]

Status = Literal["done", "failed", "does not fit", "started"]
"""A case that is ``started`` in a file of an earlier run ended its process, or was stopped at the time limit."""


class CaseResult(BaseModel):
    """The result of one case."""

    model_config = ConfigDict(extra="forbid")

    status: Status
    rows: list[list[Any]] = Field(default_factory=list)
    message: str = ""
    """Why there are no rows, in one line."""
    seconds: float = 0.0
    """How long the case took."""
    date: str = ""
    """The day in UTC, as 2026-01-31."""


class PartResults(BaseModel):
    """The results of a part on one machine."""

    model_config = ConfigDict(extra="forbid")

    environment: dict[str, str]
    """Device, driver and versions; see :func:`.worker.describe`."""
    cases: dict[str, CaseResult] = Field(default_factory=dict)
    """By name of the case."""

    def start(self, name: str, path: Path) -> None:
        """Note that a case begins."""
        self.cases[name] = CaseResult(status="started", message="it ended the process, or was stopped", date=_today())
        self._save(path)

    def finish(self, name: str, result: CaseResult, path: Path) -> None:
        """Note the result of a case."""
        self.cases[name] = result.model_copy(update={"date": _today()})
        self._save(path)

    def _save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.model_dump(mode="json"), path)


def load_results(path: Path, environment: Mapping[str, str] | None = None) -> PartResults | None:
    """The results in ``path``; None if there are none, or if they are of another ``environment``."""
    if not path.exists():
        return None
    results = PartResults.model_validate_json(path.read_text(encoding="utf-8"))
    return results if environment is None or results.environment == dict(environment) else None


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
