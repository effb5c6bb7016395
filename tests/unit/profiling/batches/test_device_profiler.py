"""What profiling does on a simulated device: which sizes it runs, how often, and how much memory it leaves free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from colossal_hetero.planner.batches.batch_profile import DeviceProfile
from colossal_hetero.profiling import device_profiler
from colossal_hetero.profiling.device_profiler import RESERVE, STEADY_SECONDS, profile_device
from colossal_hetero.profiling.memory import MemoryLimit
from colossal_hetero.profiling.progress import BatchProgress


class Device:
    """A simulated device: 1,000 bytes of state, and 10 bytes per sample; ``seconds`` is the time of a pass."""

    def __init__(self, limit: int, seconds: Callable[[int, int], float], is_hard: bool = True) -> None:
        self.limit, self.is_hard = limit, is_hard
        self.held, self.peak = 0, 0
        self.runs: list[int] = []
        self._seconds = seconds

    def run(self, batch: int) -> tuple[float, float]:
        self.runs.append(batch)
        self.peak = 1000 + self.held + 10 * batch
        if self.peak > self.limit:
            raise MemoryError
        seconds = self._seconds(batch, len(self.runs))
        return seconds, seconds / 3

    @contextmanager
    def reserved(self, size_bytes: int, device: torch.device) -> Iterator[None]:
        self.held += size_bytes
        yield
        self.held -= size_bytes


def profiled(
    monkeypatch: pytest.MonkeyPatch,
    device: Device,
    cap: int,
    progress: list[BatchProgress] | None = None,
    smallest: int = 1,
) -> DeviceProfile:
    for name, value in {
        "memory_limit": lambda _: MemoryLimit(device.limit, device.is_hard, "a test"),
        "used_bytes": lambda _: 1000 + device.held,
        "peak_bytes": lambda _: device.peak,
        "reset_peak": lambda _: None,
        "reserved_memory": device.reserved,
        "recover": lambda *_: None,
        "MIN_SECONDS": 0.5,
    }.items():
        monkeypatch.setattr(device_profiler, name, value)
    return profile_device(
        device.run,
        cap,
        state_bytes_to_come=0,
        device=torch.device("cpu"),
        smallest=smallest,
        on_progress=None if progress is None else progress.append,
    )


def line(batch: int, run: int) -> float:
    return 0.05 + 0.01 * batch


@pytest.mark.parametrize("is_hard", [True, False])
def test_a_share_of_the_memory_is_left_free(is_hard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(3000, line, is_hard)
    found = profiled(monkeypatch, device, 1000)
    assert found.max_batch == int(200 * (1 - RESERVE)) and found.memory_bound
    assert found.memory_bytes == 3000 - int(2000 * RESERVE)
    assert (found.memory_bytes - found.state_bytes) // found.sample_bytes == found.max_batch
    assert is_hard or max(device.runs) == found.max_batch


def test_the_smallest_batch_is_accepted_without_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    found = profiled(monkeypatch, Device(1010, line), 8)
    assert found.max_batch == 1 and found.memory_bound and found.points
    assert profiled(monkeypatch, Device(1009, line), 8).max_batch == 0
    found = profiled(monkeypatch, Device(1040, line), 8, smallest=4)
    assert (found.max_batch, found.min_batch) == (4, 4)


def test_the_end_of_the_search_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    found = profiled(monkeypatch, Device(10**6, line), 48)
    assert (found.max_batch, found.memory_bound, found.searched_batch) == (48, False, 48)


def test_sizes_that_a_straight_line_predicts_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(10**6, line)
    found = profiled(monkeypatch, device, 48)
    assert [point.batch for point in found.points] == [1, 8, 48]
    runs = Counter(device.runs)
    assert all(runs[batch] == 1 for batch in (2, 4, 16, 32)) and runs[48] == 3
    for batch in range(1, 49):
        assert found.curve(48).seconds[batch] == pytest.approx(line(batch, 0))


def test_sizes_at_a_bend_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(10**6, lambda batch, run: max(0.1, 0.01 * batch))
    found = profiled(monkeypatch, device, 64)
    assert {1, 8, 16, 64} <= {point.batch for point in found.points}
    for batch in (1, 8, 16, 32, 64):
        assert found.curve(64).seconds[batch] == pytest.approx(max(0.1, 0.01 * batch), rel=0.05)


def test_a_throttled_device_is_timed_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of 5 ms, of which each fifth one takes 80 ms: the mean is known only after several such passes."""
    steady, throttled = (
        Device(10**6, lambda batch, run: 0.005),
        Device(10**6, lambda batch, run: 0.08 if run % 5 == 0 else 0.005),
    )
    profiled(monkeypatch, steady, 1)
    found = profiled(monkeypatch, throttled, 1)
    assert len(steady.runs) * 0.005 == pytest.approx(device_profiler.MAX_REPEATS * 0.005, abs=0.006)
    assert len(throttled.runs) >= 20
    assert found.points[0].seconds == pytest.approx(0.02, rel=0.3)


def test_short_passes_are_repeated_until_a_pause_would_have_been_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(10**6, lambda batch, run: 0.02)
    profiled(monkeypatch, device, 1)
    # The first pass allocates the gradients and is not timed.
    assert (len(device.runs) - 1) * 0.02 == pytest.approx(STEADY_SECONDS, abs=0.021)


def test_the_time_left_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[BatchProgress] = []
    device = Device(10**6, lambda batch, run: 0.1 * batch)
    profiled(monkeypatch, device, 32, progress)
    assert progress[0].seconds_left is None and progress[1].seconds_left is None
    assert str(progress[1]).endswith("searching for the largest micro-batch, 1 sample")
    total, spent, known = 0.1 * sum(device.runs), 0.0, []
    for batch, each in zip(device.runs, progress, strict=True):
        if each.seconds_left is not None and each.action == "searching":
            known.append(each.seconds_left / (total - spent))
        spent += 0.1 * batch
    assert known and all(0.7 < ratio < 1.3 for ratio in known), known
    assert str(progress[2]).endswith(" s left")
