"""Methods of objects that a part of the package wraps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from colossal_hetero.common.methods import wrap_method


class Counter:
    def __init__(self) -> None:
        self.count = 1

    def add(self, number: int, *, times: int = 1) -> int:
        """The count after adding."""
        self.count += number * times
        return self.count


def test_a_wrapped_method_gets_all_arguments_and_returns_the_result() -> None:
    counter, order = Counter(), []

    def named(name: str) -> Callable[..., Any]:
        def around(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return method(*args, **kwargs) * 10

        return around

    wrap_method(counter, "add", named("inner"))
    wrap_method(counter, "add", named("outer"))
    assert counter.add(2, times=3) == 700 and counter.count == 7
    assert order == ["outer", "inner"]
    assert counter.add.__name__ == "add" and counter.add.__doc__ == "The count after adding."
    assert copy.copy(counter).add is counter.add
