"""A module with some of its names replaced."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class ModuleProxy:
    """Behaves like ``module``, except for the names in ``replaced``.

    If it is assigned to a name in one module of Colossal-AI, only that module sees the replacements.
    """

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
