"""Measure how long a rank works for a global batch, apart from the time in which it waits for other replicas.

[Note: what a rank waits for] An iteration is cut by marks. The time between two marks is

- *data*: the loop waits in the data loader's ``__next__``,
- *waiting*: the rank is in a collective with ranks of other replicas, or its last gradient has been computed and
  the backward pass has not ended, since the sum of gradients is not complete. The fast ranks spend the rest of the
  iteration here. This also holds what the collective itself takes, which does not depend on the division,
- *step*: the optimizer's step without collectives. In stage 0 no collective follows it, so the next sum of gradients
  starts later by this time on this rank; it is work. In stages 1 to 3 all ranks synchronize their parameters after it
  or in the next forward pass,
- *work*: everything else between the first ``__next__`` and the optimizer's step: forward pass, loss, backward pass,
  and what the training loop does in between.

What the loop does between the optimizer's step and the next batch (evaluation, saving, logs) is left out. Marks are
events in the device's stream, so the host never waits for the device.

Whole iterations are judged instead of forward passes only, because a device that is stopped for part of each tenth of a
second (a CPU quota) is not stopped equally often in forward and backward passes, in particular if it has waited before.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from colossalai.interface import OptimizerWrapper
from torch import Tensor
from torch.autograd import Variable

from ..accelerator import get_accelerator
from ..profiling.collective_waits import tell_waits

__all__ = ["BusyTimer", "TimedGlobalBatch"]

MAX_GLOBAL_BATCHES = 256
"""Number of global batches that are kept between two checks."""

_Part = Literal["data", "work", "waiting", "step"]


class TimedGlobalBatch(NamedTuple):
    """This rank's time for its part of a global batch."""

    sizes: tuple[int, ...]
    """Samples of the micro-batches that were drawn for it; 0 for a placeholder sample."""
    work_seconds: float
    data_seconds: float
    waiting_seconds: float
    step_seconds: float


class _MarkedIteration:
    """The marks of an iteration, each with the part that it ends."""

    def __init__(self) -> None:
        self.stream = get_accelerator().current_stream()
        self.marks: list[tuple[_Part | None, Any]] = []
        self.sizes: list[int] = []
        self.mark(None)

    def mark(self, part: _Part | None) -> None:
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        self.marks.append((part, event))

    def times(self) -> TimedGlobalBatch:
        sums: dict[_Part, float] = {"data": 0.0, "work": 0.0, "waiting": 0.0, "step": 0.0}
        for (_, before), (part, event) in pairwise(self.marks):
            assert part is not None
            sums[part] += before.elapsed_time(event) * 1e-3
        return TimedGlobalBatch(tuple(self.sizes), sums["work"], sums["data"], sums["waiting"], sums["step"])


class BusyTimer:
    """Times a rank's global batches. See [Note: what a rank waits for].

    Args:
        replica_of: index of the model replica that each rank belongs to, by rank. Collectives inside a replica are
            work of the replica.
    """

    def __init__(self, replica_of: Sequence[int]) -> None:
        self._replica_of = replica_of
        self._running: _MarkedIteration | None = None
        self._finished: deque[_MarkedIteration] = deque(maxlen=MAX_GLOBAL_BATCHES)
        self._part: _Part = "work"
        self._in_collective = False
        self._between: dict[Any, bool] = {}

    def attach(self, optimizer: OptimizerWrapper) -> None:
        """Time the backward passes and steps of ``optimizer``. Its ``step`` must be called once per global batch."""
        optimizer.backward = self._timed_backward(optimizer.backward)
        optimizer.step = self._timed_step(optimizer.step)

    def take(self) -> list[TimedGlobalBatch]:
        """The global batches that were finished since the last call, at most the latest
        :data:`MAX_GLOBAL_BATCHES`; waits for the device."""
        get_accelerator().synchronize()
        taken = [iteration.times() for iteration in self._finished]
        self._finished.clear()
        return taken

    # Called by the data loader ------------------------------------------------------------------------------------

    def before_batch(self) -> None:
        """The loop asks for the next micro-batch."""
        if self._running is None:
            self._running = _MarkedIteration()
            tell_waits(self)
        else:
            self._running.mark("work")

    def after_batch(self, samples: int | None) -> None:
        """The loop got a micro-batch with so many samples; None: there was no other one, or loading it failed."""
        if self._running is None:
            return
        self._running.mark("data")
        if samples is not None:
            self._running.sizes.append(samples)
        elif not self._running.sizes:
            self._stop()

    # Called by collectives ----------------------------------------------------------------------------------------

    def before_collective(self, group: dist.ProcessGroup | None) -> bool:
        """See :class:`~colossal_hetero.profiling.collective_waits.WaitListener`."""
        running = self._running
        if running is None or self._in_collective or not self._is_between_replicas(group):
            return False
        if get_accelerator().current_stream() != running.stream:
            return False  # it overlaps with the computation
        running.mark(self._part)
        self._in_collective = True
        return True

    def after_collective(self) -> None:
        """See :class:`~colossal_hetero.profiling.collective_waits.WaitListener`."""
        self._in_collective = False
        if self._running is not None:
            self._running.mark("waiting")

    def _is_between_replicas(self, group: dist.ProcessGroup | None) -> bool:
        if group not in self._between:
            ranks = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
            self._between[group] = len({self._replica_of[rank] for rank in ranks}) > 1
        return self._between[group]

    # Around the optimizer's methods -------------------------------------------------------------------------------

    def _timed_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def run(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            running = self._running
            if running is None or not loss.requires_grad:
                return backward(loss, *args, **kwargs)

            # Autograd calls queued functions after the last gradient, in their order. DDP and FSDP queue theirs, which
            # wait for communication, during the backward pass.
            def after_last_gradient() -> None:
                running.mark("work")
                self._part = "waiting"

            def queue(gradient: Tensor) -> None:
                Variable._execution_engine.queue_callback(after_last_gradient)

            try:
                with loss.register_hook(queue):
                    result = backward(loss, *args, **kwargs)
                running.mark("waiting")
            finally:
                self._part = "work"
            return result

        return run

    def _timed_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
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

        return run

    def _stop(self) -> None:
        self._running = None
        self._in_collective = False
        tell_waits(None)
