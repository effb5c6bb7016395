"""Checks that share a start of ranks, because starting ranks takes longer than most checks."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from colossal_hetero.layers.transformers_policy import IS_NEWER_THAN_COLOSSALAI
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH

Check = Callable[..., None]
Case = tuple[Check, tuple[Any, ...]]


class Checks:
    """The checks of a test module, each of which runs on all ranks of a world of some size (``@checks.on(2)``), one
    start for each size: ``test_on_ranks = checks.test()`` at the end of the module. A check with an argument
    ``folder`` gets an empty folder of its own, the same on all ranks."""

    def __init__(self) -> None:
        self._cases: dict[int, list[Case]] = {}

    def on(self, ranks: int, *args: Any) -> Callable[[Check], Check]:
        """Run the decorated function with ``args`` on so many ranks; it must be defined at the top of a module."""

        def add(check: Check) -> Check:
            self._cases.setdefault(ranks, []).append((check, args))
            return check

        return add

    def if_thorough(self, ranks: int, *args: Any) -> Callable[[Check], Check]:
        """As :meth:`on`, with ``make test-thorough`` only."""
        return self.on(ranks, *args) if IS_THOROUGH else lambda check: check

    def with_colossalai_passes(self, ranks: int, *args: Any) -> Callable[[Check], Check]:
        """As :meth:`on`, with releases of transformers only for which Colossal-AI has passes of its own: sequence
        parallelism needs them."""
        return self.on(ranks, *args) if not IS_NEWER_THAN_COLOSSALAI else lambda check: check

    def test(self) -> Callable[[int, Path], None]:
        """The test of the checks so far, one start for each number of ranks. The first check that fails ends it."""

        @pytest.mark.parametrize("ranks", sorted(self._cases))
        def test(ranks: int, tmp_path: Path) -> None:
            run_ranks(ranks, _run_all, self._cases[ranks], tmp_path, timeout_seconds=600)

        return test


def _run_all(cases: Sequence[Case], root: Path) -> None:
    for number, (check, args) in enumerate(cases):
        folder = root / str(number)
        folder.mkdir(exist_ok=True)
        own = {"folder": folder} if "folder" in inspect.signature(check).parameters else {}
        try:
            check(*args, **own)
        except BaseException as error:
            error.add_note(f"in {check.__module__}.{check.__qualname__}{args}")
            raise
        dist.barrier()  # all ranks have made their groups, before the first one destroys its groups
        gc.collect()


def of_all_ranks(value: Any) -> list[Any]:
    """What each rank has for ``value``, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
