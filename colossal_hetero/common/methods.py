"""Methods of objects that a part of the package wraps, functions without collections, and names that users misspell."""

import difflib
import functools
import gc
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

Kind = TypeVar("Kind", bound=type)
Given = ParamSpec("Given")
Result = TypeVar("Result")


def without_collections(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function without garbage collections while it runs: a full one looks at all that the process has loaded."""

    @functools.wraps(function)
    def run(*args: Given.args, **named: Given.kwargs) -> Result:
        collects = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **named)
        finally:
            if collects:
                gc.enable()

    return run


def check_names(owner: str, given: Collection[str], known: Collection[str]) -> None:
    """Raise ``TypeError`` for a ``given`` name of an argument that is not ``known``, with those that it resembles."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            meant = f"; did you mean {' or '.join(close)}?" if close else f"; it has {', '.join(known)}"
            raise TypeError(f"{owner} has no argument {name!r}{meant}")


def with_checked_names(kind: Kind) -> Kind:
    """Let a dataclass check the names of its fields, with :func:`check_names`."""
    make = kind.__init__  # type: ignore[misc]

    @functools.wraps(make)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        check_names(kind.__name__, kwargs, [each.name for each in fields(kind)])
        make(self, *args, **kwargs)

    kind.__init__ = checked  # type: ignore[misc]
    return kind


def wrap_method(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let ``owner.name(*args, **kwargs)`` call ``around(method, *args, **kwargs)`` with the method that it replaces."""
    method = getattr(owner, name)

    # A function, because copies of ``owner`` share it.
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    setattr(owner, name, run)
