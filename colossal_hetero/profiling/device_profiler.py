"""Measure a device: the largest micro-batch that it holds, and the time of micro-batches (Poplar, Algorithm 1). Memory
is measured with every trial; the algorithm's prediction from one sample only sets which sizes come first.

[Note: reserve] Training may need more memory than the trials: for longer samples, the optimizer's step, and
fragmentation. So the share ``RESERVE`` of the memory that micro-batches could use is held while sizes are tried. Only
the smallest micro-batch is accepted without a reserve.

[Note: straight curves] Only the largest and the smallest size are always timed, then one in the middle. If the straight
line between its neighbors predicts its time, no others are timed; otherwise each half is treated alike.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

import torch

from ..colossalai_support.accelerator import get_accelerator, is_out_of_memory
from ..planner.batches.batch_profile import DeviceProfile, TimedBatch
from .memory import memory_limit, peak_bytes, recover, reserved_memory, reset_peak, used_bytes
from .progress import SEARCHING, TIMING, Progress

Estimate = Callable[[], int | None]
GUIDED = 2  # number of trials at the estimate; if it is exact, trying it and one neighbor proves that

# Let L be the largest batch that fits and k = ⌊log2 L⌋. Doubling takes k + 1 trials that fit and one that does not, and
# leaves at most 2^k − 1 candidates, for which bisection needs at most k, also after trials at an estimate: in total at
# most 2k + 2 + GUIDED ≤ 2·log2 L + 4 trials, and k + 4 with a good estimate.


def largest_batch(
    fits: Callable[[int], bool],
    cap: int,
    estimate: Estimate | None = None,
    *,
    smallest: int = 1,
    may_exceed_estimate: bool = True,
) -> int:
    """The largest batch in ``smallest``..``cap`` that fits, found in at most ``2·log2(largest) + 4`` trials; 0 if not
    even the smallest fits."""
    if not 1 <= smallest <= cap:
        raise ValueError(f"smallest={smallest} and cap={cap} must be at least 1 sample, and cap not below smallest")
    largest, failed = 0, cap + 1

    def expected() -> int | None:
        return None if estimate is None else estimate()

    def permitted(batch: int) -> int:
        """``batch``, limited to the estimate if it must not be exceeded; at most ``largest`` if no trial is allowed."""
        room = None if may_exceed_estimate or largest == 0 else expected()
        return batch if room is None else min(batch, room)

    def attempt(batch: int) -> None:
        nonlocal largest, failed
        if fits(batch):
            largest = batch
        else:
            failed = batch

    held_back = 0
    while failed > cap and largest < cap:
        double = min(max(2 * largest, smallest), cap)
        batch = permitted(double)
        # If the estimate grows a little with each trial, the search takes many; end it after two below double.
        held_back += batch < double
        if batch <= largest or held_back > 2:
            return largest
        attempt(batch)

    guided = 0
    while failed - largest > 1 and largest > 0:
        guess = expected() if guided < GUIDED else None
        if guess is None:
            batch = (largest + failed) // 2
        else:
            guided += 1
            batch = min(max(guess, largest + 1), failed - 1)
        batch = permitted(batch)
        if batch <= largest:
            break
        attempt(batch)
    return largest


MIN_SECONDS = 0.5
"""Seconds that each size runs at least: a throttled device is fast in some short passes and slow in others."""
REPEATS = 3  # number of runs that each timed size has at least
MAX_REPEATS = 30
STEADY_SECONDS = 0.2  # seconds that are enough for equally long runs: a throttled device would have been stopped twice.
STEADY_SPREAD = 1.25
"""Largest ratio of the longest to the shortest run, without the first one, of runs that take about equally long."""
RESERVE = 0.03  # share of the memory left for micro-batches that is kept free; see [Note: reserve].
STRAIGHT = 0.03  # largest relative error of a time predicted by a straight line; see [Note: straight curves].
MANY_RUNS = 4  # number of runs from which a mean replaces the median
WINDOW_SECONDS = 0.3
"""Longer than the period of a CPU quota: a throttled CPU is fast in some matrix products and stopped in others."""
REPEATS_OF_A_DIP = 2  # number of times that a size is measured again if it is slower than a larger one
TOLERATED_DIP = 0.1
"""Largest share by which a size may be slower than a larger one; above it, it gets the time of the larger one."""


Run = Callable[[int], float]


def profile_device(
    run: Run,
    cap: int,
    *,
    state_bytes_to_come: int,
    device: torch.device,
    smallest: int = 1,
    on_progress: Callable[[Progress], None] | None = None,
    abort: Callable[[], None] = lambda: None,
    flops: float | None = None,
) -> DeviceProfile:
    """Find the largest micro-batch of at most ``cap`` samples that runs, and time as many sizes as the curve needs.

    If not even the smallest fits, ``max_batch`` is 0 and there are no points. If exceeding the memory limit would end
    the process (:func:`.memory_limit`), no size that is expected to exceed it is tried. Calls no collective.
    """
    limit = memory_limit(device)
    state, sample, largest = used_bytes(device), 0, 0
    reserve = 0
    trials = _Trials(run, device, on_progress, abort)
    points: tuple[TimedBatch, ...] = ()
    try:
        with reserved_memory(state_bytes_to_come, device):
            # The first pass also allocates the gradients and everything that libraries allocate at their first use.
            if trials.attempt(smallest, keep=False):
                recover()
                state = trials.base = used_bytes(device)
                reserve = int(RESERVE * max(limit.bytes - state, 0))
                trials.limit = limit.bytes - reserve
                # A limit that is not hard is kept by the estimate, so that nothing needs to be held.
                with trials.held(reserve if limit.is_hard else 0):
                    largest = trials.find(cap, smallest, may_exceed_estimate=limit.is_hard)
                if largest == 0:
                    largest = trials.find(smallest, smallest, may_exceed_estimate=limit.is_hard)
                sample = trials.sample_bytes(largest) if largest else 0
                points = trials.points()
    except Exception as error:
        # Only the reserved memory can be missing here; errors of passes are caught in `attempt`.
        if not is_out_of_memory(error):
            raise
        recover(error)
        state += state_bytes_to_come
    return DeviceProfile(
        device=device_name(device),
        host=socket.gethostname(),
        memory_bytes=limit.bytes - reserve,
        state_bytes=state,
        sample_bytes=sample,
        max_batch=largest,
        memory_bound=largest < cap,
        min_batch=smallest,
        points=points,
        flops=flops,
        protocols=("nccl", "gloo") if device.type == "cuda" else ("gloo",),
    )


@dataclass
class _Trials:
    run: Run
    device: torch.device
    on_progress: Callable[[Progress], None] | None
    abort: Callable[[], None]
    base: int = 0
    limit: int = 0

    def __post_init__(self) -> None:
        self._failed: int | None = None
        self._held = 0
        self._action = SEARCHING
        self._timings: dict[int, list[float]] = {}
        self._timed: set[int] = set()
        self._peaks: dict[int, int] = {}

    @contextmanager
    def held(self, size_bytes: int) -> Iterator[None]:
        """In the block, passes have ``size_bytes`` less memory. Peaks are stored without them."""
        with reserved_memory(size_bytes, self.device):
            self._held = size_bytes
            try:
                yield
            finally:
                self._held = 0

    def find(self, cap: int, smallest: int, *, may_exceed_estimate: bool) -> int:
        self._action = SEARCHING
        largest_batch(self.attempt, cap, self.expected, smallest=smallest, may_exceed_estimate=may_exceed_estimate)
        self._action = TIMING
        return self._time_sizes()

    def attempt(self, batch: int, keep: bool = True) -> bool:
        """Run a batch; True if it fits. With ``keep``, its time and memory are stored."""
        if self.on_progress is not None:
            self.on_progress(Progress(self._action, batch))
        reset_peak(self.device)
        timing = None
        try:
            timing = self.run(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            recover(error)
        if timing is None:
            self._failed = min(batch, self._failed or batch)
            self.abort()
            recover()
            return False
        if keep:
            self._timings.setdefault(batch, []).append(timing)
            # On a CPU the peak may not be resettable, and is useless after it has reached the limit once.
            if self.device.type != "cpu" or self._failed is None:
                self._peaks[batch] = max(peak_bytes(self.device) - self._held, self._peaks.get(batch, 0))
        return True

    def expected(self) -> int | None:
        """The largest batch expected to fit, from the peak memory of the two largest batches; None if unknown."""
        last, slope = self._line()
        return max(last + int((self.limit - self._peaks[last]) // slope), 0) if slope > 0 else None

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

    def _time_sizes(self) -> int:
        """Time the sizes that ran, as far as the curve needs them; returns the largest that runs reliably."""
        largest = max(self._timings, default=0)
        while largest > 0 and not self._time(largest):
            largest = self._step_down(largest)
        sizes = sorted(self._timings)
        if sizes and self._time(sizes[0]):
            self._time_between(sizes)
        for _ in range(REPEATS_OF_A_DIP):
            for batch in self._dips():
                before, self._timings[batch] = self._timings[batch], []
                if not self._time(batch):
                    self._timings[batch] = before
        return largest

    def _time(self, batch: int) -> bool:
        while self._lacks_runs(batch):
            # The memory may be fragmented; try again after the failed attempt has released its memory.
            if not (self.attempt(batch) or self.attempt(batch)):
                return False
        self._timed.add(batch)
        return True

    def _time_between(self, sizes: Sequence[int]) -> None:
        """Time sizes between the first and the last one, which are timed; see [Note: straight curves]."""
        if len(sizes) < 3:
            return
        middle = len(sizes) // 2
        first, last = self._typical(sizes[0]), self._typical(sizes[-1])
        slope = (last - first) / (sizes[-1] - sizes[0])
        if not self._time(sizes[middle]):
            return
        predicted = first + slope * (sizes[middle] - sizes[0])
        if abs(self._typical(sizes[middle]) - predicted) > STRAIGHT * predicted:
            self._time_between(sizes[: middle + 1])
            self._time_between(sizes[middle:])

    def _lacks_runs(self, batch: int) -> bool:
        timings = self._timings[batch]
        if len(timings) < REPEATS:
            return True
        if len(timings) >= MAX_REPEATS or sum(timings) >= MIN_SECONDS:
            return False
        later = timings[1:] or timings
        return sum(timings) < STEADY_SECONDS or max(later) > STEADY_SPREAD * min(later)

    def _step_down(self, batch: int) -> int:
        """Find a smaller size that runs reliably, and drop larger ones. Libraries keep memory for each size tried."""
        for other in [other for other in self._timings if other >= batch]:
            del self._timings[other]
            self._timed.discard(other)
        reliable = max(self._timings, default=0)
        step = 1
        while batch - step > reliable:
            batch -= step
            step *= 2
            if all(self.attempt(batch) for _ in range(REPEATS)):
                self._timed.add(batch)
                return batch
            self._timings.pop(batch, None)
        return reliable

    def _dips(self) -> list[int]:
        seconds = {batch: self._typical(batch) for batch in sorted(self._timed)}
        pairs = [(a, b) for a, b in pairwise(seconds) if seconds[a] > seconds[b]]
        return sorted({batch for pair in pairs for batch in pair})

    def _typical(self, batch: int) -> float:
        timings = sorted(self._timings[batch][1:] or self._timings[batch])
        if len(timings) < MANY_RUNS:
            return timings[(len(timings) - 1) // 2]
        return fmean(timings[:-1])

    def points(self) -> tuple[TimedBatch, ...]:
        """Times of all timed sizes. If a size remains clearly slower than a larger one, it gets the time of that."""
        shortest = math.inf
        points: list[TimedBatch] = []
        for batch in sorted(self._timed, reverse=True):
            seconds = self._typical(batch)
            if seconds > shortest * (1 + TOLERATED_DIP):
                seconds = shortest
            shortest = min(shortest, seconds)
            points.append(TimedBatch(batch=batch, seconds=seconds))
        return tuple(reversed(points))


def sustained_flops(device: torch.device, dtype: torch.dtype = torch.float32, windows: int = 1) -> float:
    """FLOP/s of a matrix product on ``device``: the median over ``windows``, each of :data:`WINDOW_SECONDS`."""
    size = 512 if device.type == "cpu" else 16_384 // dtype.itemsize  # which takes little of a full memory
    factor = torch.ones(size, size, device=device, dtype=dtype)
    result = torch.empty_like(factor)
    torch.mm(factor, factor, out=result)
    rates = []
    for _ in range(windows):
        get_accelerator().synchronize()
        products, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < WINDOW_SECONDS:
            torch.mm(factor, factor, out=result)
            get_accelerator().synchronize()
            products += 1
        rates.append(2 * size**3 * products / passed)
    return median(rates)


def device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(get_accelerator().get_device_name(device))
