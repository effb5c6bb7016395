"""Measure a device: the largest micro-batch that it holds, and the time of micro-batches (Poplar, Algorithm 1).

Every rank measures its own device at its own pace, without communication:

.. code-block:: python

    with preserved_state(model, optimizer), local_collectives(model):
        profile = profile_device(
            run, cap, state_bytes_to_come=optimizer_state_bytes(optimizer), device=device,
            abort=lambda: abort_step(model, optimizer),
        )

Algorithm 1 predicts the largest batch from the memory of one sample. Here memory is measured with every trial, and the
prediction only sets which sizes are tried first. The algorithm's loop between two sizes is corrected so that it ends.

On a CPU with an address-space limit, oneDNN (convolutions, matrix products in bfloat16) keeps some megabytes for every
size that it has run. If it runs out of memory while it compiles, it does not compile anything new in that thread
afterwards. Then only sizes that have run before still run, and the result may be below the true largest batch.
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
"""A size is run until this much time has been measured. A device that is throttled for part of each tenth of a second
is fast in some short passes and slow in others, so that a single short pass does not show its speed."""
MAX_REPEATS = 30
"""Largest number of runs of a size."""

MANY_RUNS = 4
"""Number of runs from which a mean replaces the median."""

PEAK_SECONDS = 0.2
"""How long matrix products are repeated to find the device's peak rate."""

REPEATS_OF_A_DIP = 2
"""How often a size is measured again if it is slower than a larger one."""

TOLERATED_DIP = 0.1
"""Largest share by which a size may be slower than a larger one; above it, it gets the time of the larger one."""


DISTRIBUTED_STATE_BYTES = 8
"""Largest state, in bytes per parameter, of Colossal-AI's distributed optimizers (Lamb, CAME, Adafactor, GaLore), which
keep two moments."""


class Timing(NamedTuple):
    """Time of a forward and backward pass."""

    seconds: float
    forward_seconds: float
    """The part of ``seconds`` until the loss was computed."""


@dataclass(frozen=True)
class BatchProgress:
    """Progress of profiling a device."""

    action: Literal["searching", "timing"]
    """Whether it searches for the largest micro-batch or times known sizes."""
    batch: int
    """Samples of the next micro-batch."""
    largest: int
    """Samples of the largest micro-batch that has run so far."""
    runs: int
    """Number of passes that have run or failed so far."""


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
        run: runs forward, loss and backward of a micro-batch of that many samples, synchronizes with the device before
            and after, and returns its :class:`Timing`. Gradients must stay between runs, as in accumulation.
        cap: upper limit of the search, such as the global batch size.
        state_bytes_to_come: bytes of the optimizer's state that are not allocated yet; they are reserved meanwhile.
        device: the device that ``run`` uses.
        repeats: smallest number of runs of every size, including the first one, which also prepares libraries.
        on_progress: called before each run.
        abort: called after a run that ran out of memory; it must make the model ready for the next run.
        flops: nominal or measured FLOP/s, to be stored in the profile.

    Returns:
        The device's profile. If not even one sample fits, ``max_batch`` is 0 and there are no points. If exceeding the
        memory limit would end the process (see :func:`~colossal_hetero.profiling.memory.memory_limit`), no size is
        tried that is expected to exceed it, and ``max_batch`` is the largest size below.

    Raises:
        ValueError: ``cap`` or ``repeats`` is below 1.
        Exception: any error of ``run`` that is not an out-of-memory error.

    The function calls no collective. The module's docstring shows the blocks to call it in.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    limit = memory_limit(device)
    trials = _Trials(run, device, limit.bytes, on_progress, abort)
    state, sample = used_bytes(device), 0
    points: tuple[TimedBatch, ...] = ()
    search = LargestBatch(0, ((1, False),))
    try:
        with reserved_memory(state_bytes_to_come, device):
            # The first pass also allocates the gradients and everything that libraries allocate at their first use.
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
        # Only the reserved memory can be missing here; errors of passes are caught in `attempt`.
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
    """Runs passes, and stores their times and peak memory."""

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
        """Bytes in use between passes."""

    def attempt(self, batch: int, keep: bool = True) -> bool:
        """Run a batch; whether it fits. ``keep`` says whether its time and memory are stored."""
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
            # On a CPU the peak may not be resettable, and is useless after it has reached the limit once.
            if self._device.type != "cpu" or not self._failed:
                self._peaks[batch] = max(peak_bytes(self._device), self._peaks.get(batch, 0))
        return True

    def expected(self) -> int | None:
        """The largest batch expected to fit, from the peak memory of the two largest batches; None if unknown."""
        last, slope = self._line()
        return max(last + int((self._limit - self._peaks[last]) // slope), 0) if slope > 0 else None

    def sample_bytes(self, batch: int) -> int:
        """Bytes per sample of a micro-batch of ``batch`` samples above :attr:`base`, including constant parts."""
        last, slope = self._line()
        if last == 0:
            return 0
        return max(math.ceil((self._peaks[last] + slope * (batch - last) - self.base) / batch), 0)

    def _line(self) -> tuple[int, float]:
        """The largest batch with known memory, and the bytes per sample between the second largest and it."""
        if not self._peaks:
            return 0, 0.0
        last = max(self._peaks)
        before = max((batch for batch in self._peaks if batch < last), default=0)
        return last, (self._peaks[last] - self._peaks.get(before, self.base)) / (last - before)

    def repeat(self, repeats: int) -> int:
        """Run each size at least ``repeats`` times, and repeat sizes that look slow by chance; the largest size."""
        self._action = "timing"
        for batch in sorted(self._timings):
            while self._lacks_runs(batch, repeats):
                # The memory may be fragmented; try again after the failed attempt has released its memory.
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
        """Find a smaller size that runs reliably after ``batch`` did not; drop the times of ``batch`` and larger ones.

        Libraries keep memory for every size that they have run (oneDNN keeps compiled primitives), so less memory is
        left after a search. The steps down grow, so that few new sizes are run.
        """
        for other in [other for other in self._timings if other >= batch]:
            del self._timings[other]
        reliable = max(self._timings, default=0)
        step = 1
        while batch - step > reliable:
            batch -= step
            step *= 2
            if all(self.attempt(batch) for _ in range(repeats)):
                return batch
            self._timings.pop(batch, None)
        return reliable

    def _dips(self) -> list[int]:
        """Sizes that are slower than the next larger one or faster than the next smaller one."""
        seconds = {batch: self._typical(batch).seconds for batch in sorted(self._timings)}
        pairs = [(a, b) for a, b in pairwise(seconds) if seconds[a] > seconds[b]]
        return sorted({batch for pair in pairs for batch in pair})

    def _typical(self, batch: int) -> Timing:
        """The typical timing of a size, without its first run, which prepares libraries for it.

        With many runs it is the mean without the longest one, which may be delayed by chance; with few, the median.
        """
        timings = sorted(self._timings[batch][1:] or self._timings[batch])
        if len(timings) < MANY_RUNS:
            return timings[(len(timings) - 1) // 2]
        kept = timings[:-1]
        return Timing(fmean(each.seconds for each in kept), fmean(each.forward_seconds for each in kept))

    def points(self) -> tuple[TimedBatch, ...]:
        """Times of all sizes that ran. If a size remains clearly slower than a larger one, it gets the time of that."""
        shortest = Timing(float("inf"), float("inf"))
        points: list[TimedBatch] = []
        for batch in sorted(self._timings, reverse=True):
            timing = self._typical(batch)
            if timing.seconds > shortest.seconds * (1 + TOLERATED_DIP):
                timing = shortest
            shortest = min(shortest, timing)
            points.append(TimedBatch(batch=batch, seconds=timing.seconds, forward_seconds=timing.forward_seconds))
        return tuple(reversed(points))


def optimizer_state_bytes(optimizer: torch.optim.Optimizer | OptimizerWrapper) -> int:
    """Bytes that the optimizer's first step will allocate for state that does not exist yet.

    They are measured with a copy of the optimizer object, which takes a real step with zero gradients for one parameter
    of each shape, stride, dtype and device in a group. The optimizer itself, its parameters and their gradients do not
    change. Temporary memory of a step is not counted, because activations are already released then. Colossal-AI's
    distributed optimizers know only their own shards and communicate in a step, so for them the largest possible state
    is counted instead.
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
    """FLOP/s of a matrix product with ``dtype`` on ``device``: the highest rate of products repeated for 0.2 s."""
    size = 512 if device.type == "cpu" else 4096
    factor = torch.ones(size, size, device=device, dtype=dtype)
    best, end = float("inf"), time.perf_counter() + PEAK_SECONDS
    while time.perf_counter() < end:
        get_accelerator().synchronize()
        start = time.perf_counter()
        torch.mm(factor, factor)
        get_accelerator().synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _state_after_a_step(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> int:
    """Bytes of the optimizer's state of one parameter like ``parameter``."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a learning-rate scheduler replaces it to count the steps
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
        return 0  # with so little memory, no sample will fit either
    # If there is not enough memory for the whole parameter, measure half of it and scale the result.
    half = parameter.detach().reshape(-1)[: parameter.numel() // 2]
    return math.ceil(_state_after_a_step(optimizer, group, half) * parameter.numel() / half.numel())


def _tensor_bytes(state: Any, device: torch.device) -> int:
    """Bytes on ``device`` of all tensors in ``state``, including nested containers."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size() if state.device == device else 0
    if isinstance(state, dict):
        return sum(_tensor_bytes(value, device) for value in state.values())
    if isinstance(state, (list, tuple)):
        return sum(_tensor_bytes(value, device) for value in state)
    return 0


def device_name(device: torch.device) -> str:
    """The name of ``device`` in profiles."""
    return "cpu" if device.type == "cpu" else str(get_accelerator().get_device_name(device))
