"""Times of Colossal-AI's own collectives, as communication of the iteration that is running: a rank waits for slower
ones in them, which must not count as its own work.

- in the forward and backward pass: the vocabulary-parallel embedding and loss, gathered outputs, and layers that this
  package does not replace;
- between the backward pass and the step: gradients that sequence parallelism divides, and gradient norms;
- at the end of the backward pass: the rest of the sum of gradients over replicas (:func:`time_end_of_backward`).

Balanced layers mark the clock themselves, with their kind. Messages between two ranks (mode ``ring`` of sequence
parallelism, ring attention) and ZeRO's reductions and gathers are not timed, except for that sum and for parameters
that the forward pass needs while they are still gathered (:func:`time_late_parameters`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from colossalai.booster.plugin import hybrid_parallel_plugin
from colossalai.interface import OptimizerWrapper
from colossalai.shardformer.layer import _operation, loss, utils
from torch import Tensor
from torch.autograd import Variable

from ...balance.clock import IterationClock
from ..zero.overlapped_optimizer import OverlappedZeroOptimizer

__all__ = ["time_collectives", "time_end_of_backward", "time_late_parameters"]

MODULES: tuple[ModuleType, ...] = (_operation, loss, utils, hybrid_parallel_plugin)
"""Colossal-AI's modules whose collectives are timed. Each has ``torch.distributed`` under the name ``dist``."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_single")


class _TimedWork:
    """A collective that has been started: waiting for it is communication."""

    def __init__(self, work: Any, clock: IterationClock) -> None:
        self._work, self._clock = work, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self._clock.mark("other")
        result = self._work.wait(*args, **kwargs)
        self._clock.mark("communication")
        return result


class _TimedDistributed:
    """``torch.distributed`` as one module sees it: its collectives mark ``clock``, unless that is None."""

    clock: IterationClock | None = None  # of the iteration that began last; it ignores marks between iterations

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._distributed, name)
        clock = _TimedDistributed.clock
        return attribute if clock is None or name not in COLLECTIVES else functools.partial(_timed, attribute, clock)


def _timed(collective: Callable[..., Any], clock: IterationClock, *args: Any, **kwargs: Any) -> Any:
    clock.mark("other")
    work = collective(*args, **kwargs)
    clock.mark("communication")
    return work if work is None else _TimedWork(work, clock)


def time_collectives(clock: IterationClock | None) -> None:
    """Let Colossal-AI's collectives mark ``clock`` from now on, and no other clock; None: they mark none."""
    for module in MODULES:
        if not isinstance(module.dist, _TimedDistributed):
            module.dist = _TimedDistributed(module.dist)  # type: ignore[attr-defined]
    _TimedDistributed.clock = clock


def time_end_of_backward(optimizer: OptimizerWrapper, clock_now: Callable[[], IterationClock | None]) -> None:
    """Count as communication what ``optimizer.backward`` does after the last gradient: it waits for the sum of
    gradients over replicas. ``clock_now`` returns the clock of the running iteration, None if it is not measured.
    Autograd's engine calls functions that are queued during a backward pass after its last gradient, in their order;
    data parallelism queues its waiting later than this does."""
    backward = optimizer.backward

    @functools.wraps(backward)
    def timed_backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        clock = clock_now()
        if clock is None:
            return backward(loss, *args, **kwargs)

        def queue(gradient: Tensor) -> None:
            Variable._execution_engine.queue_callback(lambda: clock.mark("other"))

        with loss.register_hook(queue):
            result = backward(loss, *args, **kwargs)
        clock.mark("communication")
        return result

    optimizer.backward = timed_backward


def time_late_parameters(optimizer: OptimizerWrapper, clock_now: Callable[[], IterationClock | None]) -> None:
    """Count waiting for late parameters as communication; ``clock_now`` as in :func:`time_end_of_backward`."""

    @contextmanager
    def timed() -> Iterator[None]:
        clock = clock_now()
        if clock is not None:
            clock.mark("other")
        yield
        if clock is not None:
            clock.mark("communication")

    if isinstance(optimizer, OverlappedZeroOptimizer) and optimizer.late_parameters is not None:
        optimizer.late_parameters.waiting = timed
