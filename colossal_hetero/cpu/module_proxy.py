"""A module seen with some of its names replaced."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class ModuleProxy:
    """Looks like ``module`` but for ``replaced``.

    Bound to a name in one module of Colossal-AI, it changes what that module sees of torch and nothing else's view.
    """

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
