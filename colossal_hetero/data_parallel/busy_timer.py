"""Measure how long a rank works for a global batch, apart from the time in which it waits for other replicas.

[Note: what a rank waits for] Marks (events in the device's stream) cut an iteration into *data* (the loop waits in the
loader's ``__next__``), *waiting* (in a collective with other replicas, or after its last gradient until the backward
pass ends), *step* (the optimizer's, without collectives; work in stage 0 only: docs/algorithms.md, 2.5) and *work* (all
else from the first ``__next__`` on). What the loop does between the step and the next batch is left out. Whole
iterations are judged, because a device under a CPU quota is not stopped equally often in both passes.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from colossalai.interface import OptimizerWrapper
from torch import Tensor
from torch.autograd import Variable

from ..colossalai_support.accelerator import get_accelerator, recorded_event
from ..common.methods import wrap_method

# Collectives are watched if called as attributes of ``torch.distributed``: by the script, ZeRO's optimizer, FSDP and
# ``SyncBatchNorm``. ``DistributedDataParallel`` sums gradients in C++, which is not seen here.
COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "barrier"),
    *("all_gather_single", "reduce_scatter_single"),  # torch 2.14's names of two of them
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
)


@contextmanager
def calling_after_last_gradient(loss: Tensor, function: Callable[[], None]) -> Iterator[None]:
    """In the block, a backward pass of ``loss`` calls ``function`` after its last gradient, and before it waits for the
    sum of gradients over replicas: autograd calls queued functions in order, and DDP and FSDP queue theirs later."""
    with loss.register_hook(lambda _: Variable._execution_engine.queue_callback(function)):
        yield


_listener: BusyTimer | None = None


def tell_waits(listener: BusyTimer | None) -> None:
    """Tell only ``listener`` about collectives from now on; None: nobody."""
    global _listener
    _listener = listener
    if listener is not None:
        for name in COLLECTIVES:
            function = getattr(dist, name, None)
            if function is not None and not hasattr(function, "tells_waits"):
                setattr(dist, name, _told(function))


@contextmanager
def _telling(group: dist.ProcessGroup | None) -> Iterator[bool]:
    """Tell the listener about a collective of ``group`` in the block; False if nobody listens to it."""
    listener = _listener
    if listener is None or not listener.before_collective(group):
        yield False
        return
    try:
        yield True
    finally:
        listener.after_collective()


class _ToldWork:
    """A started collective, waiting for which is told to the listener."""

    def __init__(self, work: Any, group: dist.ProcessGroup | None) -> None:
        self._work, self._group = work, group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with _telling(self._group):
            return self._work.wait(*args, **kwargs)


def _told(collective: Callable[..., Any]) -> Callable[..., Any]:
    place = list(inspect.signature(collective).parameters).index("group")

    @functools.wraps(collective)
    def run(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group", args[place] if len(args) > place else None)
        with _telling(group) as is_told:
            work = collective(*args, **kwargs)
        return _ToldWork(work, group) if is_told and work is not None else work

    run.tells_waits = True  # type: ignore[attr-defined]
    return run


MAX_GLOBAL_BATCHES = 256
_Part = Literal["data", "work", "waiting", "step"]


class TimedGlobalBatch(NamedTuple):
    sizes: tuple[int, ...]  # samples of its micro-batches; 0 for a placeholder sample
    work_seconds: float
    data_seconds: float
    waiting_seconds: float
    step_seconds: float


class _MarkedIteration:
    def __init__(self) -> None:
        self.stream = get_accelerator().current_stream()
        self.marks: list[tuple[_Part | None, Any]] = []
        self.sizes: list[int] = []
        self.mark(None)

    def mark(self, part: _Part | None) -> None:
        self.marks.append((part, recorded_event()))

    def times(self) -> TimedGlobalBatch:
        sums: dict[_Part, float] = {"data": 0.0, "work": 0.0, "waiting": 0.0, "step": 0.0}
        for (_, before), (part, event) in pairwise(self.marks):
            assert part is not None
            sums[part] += before.elapsed_time(event) * 1e-3
        return TimedGlobalBatch(tuple(self.sizes), *(sums[part] for part in ("work", "data", "waiting", "step")))


class BusyTimer:
    """Times a rank's global batches. See [Note: what a rank waits for]."""

    def __init__(self, replica_of: Sequence[int]) -> None:
        self._replica_of = replica_of
        self._running: _MarkedIteration | None = None
        self._finished: deque[_MarkedIteration] = deque(maxlen=MAX_GLOBAL_BATCHES)
        self._part: _Part = "work"
        self._in_collective = False
        self._between: dict[Any, bool] = {}

    def attach(self, optimizer: OptimizerWrapper) -> None:
        """Time backward passes and steps of ``optimizer``, whose ``step`` must be called once per global batch."""
        wrap_method(optimizer, "backward", self._backward)
        wrap_method(optimizer, "step", self._step)

    def take(self) -> list[TimedGlobalBatch]:
        """The latest finished global batches (:data:`MAX_GLOBAL_BATCHES`) since the last call; waits for the device."""
        get_accelerator().synchronize()
        taken = [iteration.times() for iteration in self._finished]
        self._finished.clear()
        return taken

    def before_batch(self) -> None:
        """Begin of the loop's wait for the next micro-batch."""
        if self._running is None:
            self._running = _MarkedIteration()
            tell_waits(self)
        else:
            self._running.mark("work")

    def after_batch(self, samples: int | None) -> None:
        """End of the wait, for so many samples; None: there was no other micro-batch, or loading it failed."""
        if self._running is None:
            return
        self._running.mark("data")
        if samples is not None:
            self._running.sizes.append(samples)
        elif not self._running.sizes:
            self._stop()

    def before_collective(self, group: dist.ProcessGroup | None) -> bool:
        """Begin of a collective of ``group``; True if :meth:`after_collective` is to be called at its end."""
        running = self._running
        if running is None or self._in_collective or not self._is_between_replicas(group):
            return False
        if get_accelerator().current_stream() != running.stream:
            return False  # it overlaps with the computation
        running.mark(self._part)
        self._in_collective = True
        return True

    def after_collective(self) -> None:
        self._in_collective = False
        if self._running is not None:
            self._running.mark("waiting")

    def _is_between_replicas(self, group: dist.ProcessGroup | None) -> bool:
        if group not in self._between:
            ranks = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
            self._between[group] = len({self._replica_of[rank] for rank in ranks}) > 1
        return self._between[group]

    def _backward(self, backward: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        running = self._running
        if running is None or not loss.requires_grad:
            return backward(loss, *args, **kwargs)

        def wait() -> None:
            running.mark("work")
            self._part = "waiting"

        try:
            with calling_after_last_gradient(loss, wait):
                result = backward(loss, *args, **kwargs)
            running.mark("waiting")
        finally:
            self._part = "work"
        return result

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._running is not None:
            self._running.mark("work")
        self._part = "step"
        try:
            result = step(*args, **kwargs)
        finally:
            self._part = "work"
        if self._running is not None:
            self._running.mark("step")
            self._finished.append(self._running)
        self._stop()
        return result

    def _stop(self) -> None:
        self._running = None
        self._in_collective = False
        tell_waits(None)
