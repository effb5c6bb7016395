"""A GPU whose events happen when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["FakeDevice"]


class FakeDevice:
    """A device, with :attr:`fakes` for functions of ``torch.cuda``."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.reached = 0
        self.recorded = 0
        self.read = 0
        """Calls of ``elapsed_time``."""
        self.queried = 0
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self, stream: Any = None) -> None:
                device.recorded += 1
                self.number, self.milliseconds = device.recorded, device.milliseconds

            def query(self) -> bool:
                device.queried += 1
                return self.number <= device.reached

            def synchronize(self) -> None:
                device.catch_up()

            def elapsed_time(self, end: Event) -> float:
                assert self.number <= device.reached and end.number <= device.reached, "waited for the device"
                device.read += 1
                return end.milliseconds - self.milliseconds

        self.fakes: dict[str, Callable] = {"Event": Event, "current_stream": lambda: "stream"}

    def catch_up(self) -> None:
        self.reached = self.recorded
