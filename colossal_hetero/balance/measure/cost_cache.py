"""Measured costs on disk, by what they were measured on, so that the next run on the same devices starts at once."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...io.atomic import replacing
from ..decide.costs import Costs

__all__ = ["CostCache", "default_folder"]

SCHEMA = 1
"""Of the files; those of another one are measured anew."""


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/colossal_hetero``, or ``~/.cache/colossal_hetero``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "colossal_hetero"


class CostCache:
    """A file per set of context in one folder; ``None`` is the default folder, ``""`` keeps nothing."""

    def __init__(self, folder: str | None) -> None:
        self._folder = default_folder() if folder is None else Path(folder) if folder else None

    def path(self, context: Mapping[str, Any]) -> Path | None:
        """Where costs measured under these context are kept; they must be what JSON can hold."""
        if self._folder is None:
            return None
        key = hashlib.sha256(json.dumps(context, sort_keys=True).encode()).hexdigest()[:16]
        return self._folder / f"costs-{key}.json"

    def read(self, context: Mapping[str, Any]) -> Costs | None:
        """The costs, or None if there are none that can be used: no file, a damaged one, another schema."""
        path = self.path(context)
        if path is None:
            return None
        with suppress(OSError, ValueError, TypeError, KeyError):
            content = json.loads(path.read_text(encoding="utf-8"))
            # As JSON has it: what was a tuple is a list.
            if content["schema"] == SCHEMA and content["circumstances"] == json.loads(json.dumps(context)):
                return Costs(**content["costs"])
        return None

    def write(self, context: Mapping[str, Any], costs: Costs) -> None:
        """Keep the costs. A folder that cannot be written to is warned of, and nothing is kept."""
        path = self.path(context)
        if path is None:
            return
        content = {"schema": SCHEMA, "circumstances": context, "costs": asdict(costs)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as draft:
                draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            warnings.warn(
                f"the measured costs of balancing cannot be kept in {path.parent} ({error}); they are measured again "
                "in every run. Set BalanceConfig.cost_cache to a folder that can be written to, or to '' for none",
                stacklevel=2,
            )
