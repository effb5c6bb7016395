"""What a plugin tells its user: which rank was slow, what was done about it, and what an iteration takes."""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakMethod

import torch.distributed as dist
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ..common.methods import wrap_method

log = logging.getLogger(__name__)

OnReport = Callable[[dict[str, float]], object]


class Reports:
    """When a plugin reports, and to whom."""

    def __init__(self, on_report: OnReport | None, every: int) -> None:
        if on_report is not None and not callable(on_report):
            raise TypeError(f"on_report={on_report!r} is not a function that takes a dict of numbers")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"report_every={every!r} must be a number of optimizer steps, at least 1")
        self._on_report = on_report
        self.every = every

    def callback(self, report: Callable[[], Report]) -> Callable[..., None] | None:
        """What to call when there are new numbers. It does not keep the plugin with this method ``report`` alive."""
        on_report, reference = self._on_report, WeakMethod(report)
        if on_report is None:
            return None

        def call(steps: int | None = None) -> None:
            method = reference()
            if method is None:
                return
            found = method()
            numbers = {"iteration": found.iterations if steps is None else steps} | found.numbers()
            try:
                on_report(numbers)
            except Exception:  # a logger that cannot be reached does not end training
                log.warning("on_report failed after iteration %d", numbers["iteration"], exc_info=True)

        return call

    def attach(self, optimizer: Any, report: Callable[[], Report]) -> None:
        """Report on rank 0 after so many steps of ``optimizer``, where no balancer counts iterations."""
        call, steps = self.callback(report), itertools.count(1)
        if call is None or dist.get_rank() != 0:
            return

        def step(make_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result, number = make_step(*args, **kwargs), next(steps)
            if number % self.every == 0:
                call(number)
            return result

        wrap_method(optimizer, "step", step)


Part = Any
"""A dataclass with ``shown()``, tables and sentences for rich, and ``numbers()``, all numbers by flat names."""


@dataclass(frozen=True)
class Report:
    """State of a run, as far as this rank knows it. Printing it shows tables."""

    iterations: int = 0
    """Optimizer steps after which ranks exchanged the numbers of ``balance``."""
    balance: Part | None = None
    """A :class:`.BalanceReport` of the tensor-parallel group whose iterations take longest."""
    batches: Part | None = None
    """A :class:`.BatchReport` where global batches are divided by speed."""
    stages: Part | None = None
    """A :class:`.DriftReport` of a planned pipeline, after its first epoch."""
    recoveries: Part | None = None
    """The :class:`.Recoveries` of elastic training."""

    def as_dict(self) -> dict[str, Any]:
        """The report as numbers, strings, lists and dicts. Times are in seconds, shares in [0, 1]."""
        return asdict(self)

    def numbers(self) -> dict[str, float]:
        """All numbers of the report by flat names, such as ``balance/rank1/work_seconds``, for loggers."""
        return {f"{name}/{key}": value for name, part in self._parts() for key, value in part.numbers().items()}

    def print(self) -> None:
        """Print the report on rank 0; other ranks print nothing."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            Console(highlight=False).print(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for _, part in self._parts():
            yield from part.shown()
        if not any(self._parts()):
            yield Text("Nothing is known yet: the first numbers come after a few optimizer steps.")

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=80, highlight=False).print(self)
        return text.getvalue().rstrip()

    def _parts(self) -> Iterator[tuple[str, Part]]:
        for name in ("balance", "batches", "stages", "recoveries"):
            if (part := getattr(self, name)) is not None:
                yield name, part
