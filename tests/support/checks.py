"""Checks that share a start of ranks, because starting ranks takes longer than most checks."""

import gc
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from colossal_hetero.layers.transformers_policy import IS_NEWER_THAN_COLOSSALAI
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH

Check = Callable[..., None]
Cases = dict[int, list[tuple[Check, tuple[Any, ...]]]]


def on(ranks: int, *args: Any) -> Callable[[Check], Check]:
    """Run the decorated function, at the top of a test module, with ``args`` on all ranks of a world of so many ranks.
    The module gets one test for all such checks, ``test_on_ranks``, with one start for each number of ranks; the first
    check that fails ends it. A check with an argument ``folder`` gets an empty folder, the same on all ranks."""

    def add(check: Check) -> Check:
        names = vars(sys.modules[check.__module__])
        if "test_on_ranks" not in names:
            names["test_on_ranks"] = _test_of(names.setdefault("_cases", {}))
        names["_cases"].setdefault(ranks, []).append((check, args))
        return check

    return add


def if_thorough(ranks: int, *args: Any) -> Callable[[Check], Check]:
    """As :func:`on`, with ``make test-thorough`` only."""
    return on(ranks, *args) if IS_THOROUGH else lambda check: check


def with_colossalai_passes(ranks: int, *args: Any) -> Callable[[Check], Check]:
    """As :func:`on`, with releases of transformers only for which Colossal-AI has passes of its own: sequence
    parallelism needs them."""
    return on(ranks, *args) if not IS_NEWER_THAN_COLOSSALAI else lambda check: check


def _test_of(cases: Cases) -> Callable[[int, Path], None]:
    @pytest.mark.parametrize("ranks", cases)
    def test(ranks: int, tmp_path: Path) -> None:
        run_ranks(ranks, _run_all, cases[ranks], tmp_path, timeout_seconds=600)

    return test


def _run_all(cases: Sequence[tuple[Check, tuple[Any, ...]]], root: Path) -> None:
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
