"""Methods of objects that a part of the package wraps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap_method(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let ``owner.name(*args, **kwargs)`` call ``around(method, *args, **kwargs)`` with the method that it replaces."""
    method = getattr(owner, name)

    # A function, because copies of ``owner`` share it.
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    setattr(owner, name, run)
