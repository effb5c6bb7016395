"""Measure a device: the largest micro-batch that it holds, and how long micro-batches take (Poplar, Algorithm 1).

Every rank measures itself, at its own pace and without communication:

.. code-block:: python

    with preserved_state(model, optimizer), local_collectives(model):
        profile = profile_device(
            run, cap, state_bytes_to_come=optimizer_state_bytes(optimizer), device=device,
            abort=lambda: abort_step(model, optimizer),
        )

Where Algorithm 1 predicts the largest batch from one sample, here memory is measured anew with every trial, and the
prediction says where to look, not what is found. The loop that searches between two sizes ends.

On a CPU whose address space is limited, oneDNN (convolutions, products in bfloat16) keeps some megabytes for every size
it has run. Once it lacks memory while it compiles, it refuses to compile anything new in that thread. Sizes that have
run still run then, others do not, and the largest that is found may be below the true one.
"""

from __future__ import annotations

import math
import socket
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...accelerator import get_accelerator
from ...planner.batches.batch_profile import DeviceProfile, TimedBatch
from ..memory import is_out_of_memory, memory_limit, peak_bytes, recover, reserved_memory, reset_peak, used_bytes
from ..preserved_state import inner_optimizer
from .largest_batch import LargestBatch, largest_batch

# isort: split
from colossalai.interface import OptimizerWrapper
from colossalai.interface.optimizer import DistributedOptim

__all__ = ["BatchProgress", "Timing", "device_name", "optimizer_state_bytes", "peak_flops", "profile_device"]

MIN_SECONDS = 0.5
MAX_REPEATS = 30
"""A size is run until that much time has been measured, or that often: a device that is throttled for part of each
tenth of a second is fast in some short passes and slow in others."""

MANY_RUNS = 4

REPEATS_OF_A_DIP = 2
"""How often a time is measured again that is above that of a larger batch."""

TOLERATED_DIP = 0.1
"""Share by which a batch may be slower than a larger one; what is slower still makes no curve."""


DISTRIBUTED_STATE_BYTES = 8
"""Per parameter, what Colossal-AI's distributed optimizers (Lamb, CAME, Adafactor, GaLore) keep at most: 2 moments."""


class Timing(NamedTuple):
    """What a forward and backward pass took."""

    seconds: float
    forward_seconds: float
    """Of these, until the loss was there."""


@dataclass(frozen=True)
class BatchProgress:
    """How far a profile is."""

    action: Literal["searching", "timing"]
    batch: int
    """What runs next."""
    largest: int
    """The largest batch that has run so far."""
    runs: int
    """Passes that have run or failed so far."""


Run = Callable[[int], tuple[float, float]]


def profile_device(
    run: Run,
    cap: int,
    *,
    state_bytes_to_come: int,
    device: torch.device,
    repeats: int = 3,
    on_progress: Callable[[BatchProgress], None] | None = None,
    abort: Callable[[], None] = lambda: None,
    flops: float | None = None,
) -> DeviceProfile:
    """Find the largest micro-batch of at most ``cap`` samples that runs, and time every size on the way.

    Args:
        run: runs forward, loss and backward of a micro-batch of that many samples, between synchronizations with the
            device, and returns its :class:`Timing` (seconds in all, and of forward). Gradients stay between runs, as
            they do when they are accumulated.
        cap: the largest batch of interest, such as the global batch size.
        state_bytes_to_come: what the optimizer's state will take that is not allocated yet; so much is held meanwhile.
        device: on which ``run`` runs.
        repeats: every size is run so often at least, its first run (which also prepares libraries for it) included.
        on_progress: called before each run.
        abort: called after a run that failed for want of memory; makes the model ready for the next.
        flops: nominal or measured FLOP/s, to be noted.

    Returns:
        With ``max_batch`` 0 and no points if not even one sample fits. Where exceeding the limit would end the process
        (see :func:`~colossal_hetero.profiling.memory.memory_limit`) the search stays below what memory measured so
        far lets expect, and ``max_batch`` is the largest that does.

    Raises:
        ValueError: ``cap`` or ``repeats`` is below 1.
        Exception: whatever ``run`` raises that does not say that memory did not suffice.

    There is no collective in it. See the module's docstring for the blocks to call it in.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}; every size must run at least once")
    limit = memory_limit(device)
    trials = _Trials(run, device, limit.bytes, on_progress, abort)
    state, sample = used_bytes(device), 0
    points: tuple[TimedBatch, ...] = ()
    search = LargestBatch(0, ((1, False),))
    try:
        with reserved_memory(state_bytes_to_come, device):
            # The first pass also allocates the gradients and whatever libraries set up when they are first used.
            if trials.attempt(1, keep=False):
                recover()
                state = trials.base = used_bytes(device)
                search = largest_batch(trials.attempt, cap, trials.expected, may_exceed_estimate=limit.is_hard)
                largest = trials.repeat(repeats)
                sample = trials.sample_bytes(largest) if largest else 0
                points = trials.points()
                if largest < search.largest:
                    search = LargestBatch(largest, (*search.tried, (search.largest, False)))
    except Exception as error:
        # Only the reserved_memory may lack memory here; passes are caught where they run.
        if not is_out_of_memory(error):
            raise
        recover(error)
        state += state_bytes_to_come
    return DeviceProfile(
        device=device_name(device),
        host=socket.gethostname(),
        memory_bytes=limit.bytes,
        state_bytes=state,
        sample_bytes=sample,
        max_batch=search.largest,
        memory_bound=search.largest < cap,
        points=points,
        flops=flops,
        protocols=("nccl", "gloo") if device.type == "cuda" else ("gloo",),
    )


class _Trials:
    """The passes that have run: their times, and the memory they took."""

    def __init__(
        self,
        run: Run,
        device: torch.device,
        limit_bytes: int,
        on_progress: Callable[[BatchProgress], None] | None,
        abort: Callable[[], None],
    ) -> None:
        self._run = run
        self._device = device
        self._limit = limit_bytes
        self._on_progress = on_progress
        self._abort = abort
        self._runs = 0
        self._failed = False
        self._action: Literal["searching", "timing"] = "searching"
        self._timings: dict[int, list[Timing]] = {}
        self._peaks: dict[int, int] = {}
        self.base = 0
        """Bytes used between passes."""

    def attempt(self, batch: int, keep: bool = True) -> bool:
        """Run a batch; whether memory sufficed. ``keep`` its time."""
        if self._on_progress is not None:
            self._on_progress(BatchProgress(self._action, batch, max(self._timings, default=0), self._runs))
        self._runs += 1
        reset_peak(self._device)
        timing = None
        try:
            timing = Timing(*self._run(batch))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            recover(error)
        if timing is None:
            self._failed = True
            self._abort()
            recover()
            return False
        if keep:
            self._timings.setdefault(batch, []).append(timing)
            # A peak that cannot be reset tells nothing once it has been at the limit.
            if self._device.type != "cpu" or not self._failed:
                self._peaks[batch] = max(peak_bytes(self._device), self._peaks.get(batch, 0))
        return True

    def expected(self) -> int | None:
        """The largest batch that should fit, from the memory that the two largest have taken."""
        last, slope = self._line()
        return max(last + int((self._limit - self._peaks[last]) // slope), 0) if slope > 0 else None

    def sample_bytes(self, batch: int) -> int:
        """What each sample of a ``batch`` takes beyond :attr:`base`, including its part of what does not grow."""
        last, slope = self._line()
        if last == 0:
            return 0
        return max(math.ceil((self._peaks[last] + slope * (batch - last) - self.base) / batch), 0)

    def _line(self) -> tuple[int, float]:
        """The largest batch whose memory is known, and how much more a sample took from the second largest to it."""
        if not self._peaks:
            return 0, 0.0
        last = max(self._peaks)
        before = max((batch for batch in self._peaks if batch < last), default=0)
        return last, (self._peaks[last] - self._peaks.get(before, self.base)) / (last - before)

    def repeat(self, repeats: int) -> int:
        """Run each size ``repeats`` times or more, and again those that look slow by chance; the largest that can."""
        self._action = "timing"
        for batch in sorted(self._timings):
            while self._lacks_runs(batch, repeats):
                # Memory may lie in pieces; once more, now that it has been put in order.
                if self.attempt(batch) or self.attempt(batch):
                    continue
                return self._step_down(batch, repeats)
        for _ in range(REPEATS_OF_A_DIP):
            for batch in self._dips():
                before, self._timings[batch] = self._timings[batch], []
                while self._lacks_runs(batch, repeats):
                    if not self.attempt(batch):
                        self._timings[batch] = before
                        return max(self._timings)
        return max(self._timings, default=0)

    def _lacks_runs(self, batch: int, repeats: int) -> bool:
        timings = self._timings[batch]
        if len(timings) < repeats:
            return True
        return len(timings) < MAX_REPEATS and sum(timing.seconds for timing in timings) < MIN_SECONDS

    def _step_down(self, batch: int, repeats: int) -> int:
        """Below a size that ran but does not do so reliably; its time and those of larger ones are dropped.

        Libraries keep something for every size that they have seen (oneDNN its compiled primitives), so that a search
        leaves less than it found. Ever larger steps down do not add to that for long.
        """
        for other in [other for other in self._timings if other >= batch]:
            del self._timings[other]
        reliable = max(self._timings, default=0)
        less = 1
        while batch - less > reliable:
            batch -= less
            less *= 2
            if all(self.attempt(batch) for _ in range(repeats)):
                return batch
            self._timings.pop(batch, None)
        return reliable

    def _dips(self) -> list[int]:
        """Sizes that are out of order: slower than a larger one, or faster than a smaller one."""
        seconds = {batch: self._typical(batch).seconds for batch in sorted(self._timings)}
        pairs = [(a, b) for a, b in pairwise(seconds) if seconds[a] > seconds[b]]
        return sorted({batch for pair in pairs for batch in pair})

    def _typical(self, batch: int) -> Timing:
        """Of a size's runs but the first, which prepares libraries for it: of many the mean without the longest, which
        may be a hiccup; of few the median."""
        timings = sorted(self._timings[batch][1:] or self._timings[batch])
        if len(timings) < MANY_RUNS:
            return timings[(len(timings) - 1) // 2]
        kept = timings[:-1]
        return Timing(fmean(time.seconds for time in kept), fmean(time.forward_seconds for time in kept))

    def points(self) -> tuple[TimedBatch, ...]:
        """The sizes that ran. One that stays clearly slower than a larger one has that one's time."""
        least = Timing(float("inf"), float("inf"))
        points: list[TimedBatch] = []
        for batch in sorted(self._timings, reverse=True):
            timing = self._typical(batch)
            if timing.seconds > least.seconds * (1 + TOLERATED_DIP):
                timing = least
            least = min(least, timing)
            points.append(TimedBatch(batch=batch, seconds=timing.seconds, forward_seconds=timing.forward_seconds))
        return tuple(reversed(points))


def optimizer_state_bytes(optimizer: torch.optim.Optimizer | OptimizerWrapper) -> int:
    """What the optimizer's first step will allocate for its state that is not there yet.

    A real step with gradients of zero is taken by a twin of the optimizer, with one stand-in for the parameters of a
    group that are alike at a time; the optimizer itself, its parameters and their gradients are not touched. The rest
    of the memory that a step takes in passing is not counted: activations are gone by then. Colossal-AI's distributed
    optimizers, which know their own shards only and communicate, take no such step; the most that they keep is counted.
    """
    inner = inner_optimizer(optimizer)
    total = 0
    for group in inner.param_groups:
        measured: dict[tuple[Any, ...], int] = {}
        for parameter in group["params"]:
            if parameter.numel() == 0 or _tensor_bytes(inner.state.get(parameter), parameter.device):
                continue
            if isinstance(inner, DistributedOptim):
                total += DISTRIBUTED_STATE_BYTES * parameter.numel()
                continue
            kind = (parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
            if kind not in measured:
                measured[kind] = _state_after_a_step(inner, group, parameter)
            total += measured[kind]
    return total


def peak_flops(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """FLOP/s of a matrix product of that ``dtype`` on ``device``: the best of a few, in tenths of a second."""
    size = 512 if device.type == "cpu" else 4096
    factor = torch.ones(size, size, device=device, dtype=dtype)
    best, end = float("inf"), time.perf_counter() + 0.2
    while time.perf_counter() < end:
        get_accelerator().synchronize()
        start = time.perf_counter()
        torch.mm(factor, factor)
        get_accelerator().synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _state_after_a_step(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> int:
    """Bytes of the state of one parameter like ``parameter``."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler counts the steps there
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, OrderedDict())
    twin.state = defaultdict(dict)
    options = {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }
    try:
        stand_in = torch.nn.Parameter(torch.zeros_like(parameter))
        stand_in.grad = torch.zeros_like(stand_in)
        twin.param_groups = [{**options, "params": [stand_in]}]
        twin.step()
        return _tensor_bytes(twin.state.get(stand_in), parameter.device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        recover(error)
    if parameter.numel() == 1:
        return 0  # so little room is there that no sample will run either
    # Where there is no room to try it on all of the parameter, half of it tells as much.
    half = parameter.detach().reshape(-1)[: parameter.numel() // 2]
    return math.ceil(_state_after_a_step(optimizer, group, half) * parameter.numel() / half.numel())


def _tensor_bytes(state: Any, device: torch.device) -> int:
    """Bytes on ``device`` of the tensors anywhere in ``state``."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size() if state.device == device else 0
    if isinstance(state, dict):
        return sum(_tensor_bytes(value, device) for value in state.values())
    if isinstance(state, (list, tuple)):
        return sum(_tensor_bytes(value, device) for value in state)
    return 0


def device_name(device: torch.device) -> str:
    """What a profile calls ``device``."""
    return "cpu" if device.type == "cpu" else str(get_accelerator().get_device_name(device))
