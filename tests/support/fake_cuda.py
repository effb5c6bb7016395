"""Streams, events and registered memory of CUDA that only record what is done, with tensors of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

__all__ = ["FakeCuda", "FakeEvent", "FakeStream"]


class FakeStream:
    """A stream that knows what was ordered on it, in order."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority
        self.done: list[Any] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.done.append(("wait", event.stream))

    def wait_stream(self, stream: FakeStream) -> None:
        self.done.append(("wait", stream))

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event


class FakeEvent:
    """An event that is reached when :attr:`is_reached` says so."""

    is_reached = True

    def __init__(self) -> None:
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        self.stream = stream
        stream.done.append("event")

    def synchronize(self) -> None:
        assert self.stream is not None
        self.stream.done.append("synchronized")

    def query(self) -> bool:
        return self.is_reached


class FakeCuda:
    """What the code under test did; ``monkeypatch`` puts everything back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = FakeStream()
        self.streams: list[FakeStream] = []
        """Those that were made."""
        self.memory: list[tuple[str, int]] = []
        """Registered and unregistered addresses."""
        self.refuses = False
        """Whether memory cannot be registered."""
        self._current = self.main
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        cudart = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._note("unregister"))
        fakes: dict[str, Callable[..., Any]] = {
            "Stream": self._make_stream,
            "Event": FakeEvent,
            "stream": self.on,
            "current_stream": lambda device=None: self._current,
            "cudart": lambda: cudart,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[FakeStream]:
        """A block with another current stream."""
        before, self._current = self._current, stream
        try:
            yield stream
        finally:
            self._current = before

    def _make_stream(self, *args: Any, **kwargs: Any) -> FakeStream:
        self.streams.append(FakeStream(*args, **kwargs))
        return self.streams[-1]

    def _note(self, what: str) -> Callable[..., int]:
        return lambda address, *_: self.memory.append((what, address)) or 0

    def _register(self, address: int, size: int, flags: int) -> int:
        return 1 if self.refuses else self._note("register")(address)
