"""Measured costs on disk, by the context of the measurement, so that the next run on the same devices can skip it."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...io.atomic import replacing
from ...io.cache_folder import default_folder
from ..decide.costs import Costs

__all__ = ["CostCache", "default_folder"]

SCHEMA = 1
"""The version of the file format; costs in files of another version are measured again."""


class CostCache:
    """A folder with one file per context; ``None`` means the default folder, ``""`` no files."""

    def __init__(self, folder: str | None) -> None:
        self._folder = default_folder() if folder is None else Path(folder) if folder else None

    def path(self, context: Mapping[str, Any]) -> Path | None:
        """The file for costs measured in ``context``, which must consist of JSON values; None if nothing is kept."""
        if self._folder is None:
            return None
        key = hashlib.sha256(json.dumps(context, sort_keys=True).encode()).hexdigest()[:16]
        return self._folder / f"costs-{key}.json"

    def read(self, context: Mapping[str, Any]) -> Costs | None:
        """The costs measured in ``context``, or None if there is no file, or it is damaged or of another version."""
        path = self.path(context)
        if path is None:
            return None
        with suppress(OSError, ValueError, TypeError, KeyError):
            content = json.loads(path.read_text(encoding="utf-8"))
            # Compare as JSON values, in which tuples are lists.
            if content["schema"] == SCHEMA and content["context"] == json.loads(json.dumps(context)):
                return Costs(**content["costs"])
        return None

    def write(self, context: Mapping[str, Any], costs: Costs) -> None:
        """Store the costs. If the folder cannot be written to, warn and store nothing."""
        path = self.path(context)
        if path is None:
            return
        content = {"schema": SCHEMA, "context": context, "costs": asdict(costs)}
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
