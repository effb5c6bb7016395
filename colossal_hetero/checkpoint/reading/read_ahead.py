"""Read layer after layer in a thread, while layers that were read before are sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..storage.errors import CheckpointError

__all__ = ["LayerRead", "ReadAhead"]


class LayerRead(NamedTuple):
    """What to read of a layer."""

    layer: str
    is_sent: bool
    """Whether this takes memory until it is sent."""
    read: Callable[[], None]
    """Raises a ``CheckpointError`` if it cannot be read."""


class ReadAhead:
    """Reads from one place. Leave its ``with`` block to stop it.

    Args:
        layers: in the order of reading.
        ahead: so many layers that are sent may be read and not yet sent.
    """

    def __init__(self, layers: Sequence[LayerRead], ahead: int) -> None:
        self._layers = layers
        self._done = {layer.layer: threading.Event() for layer in layers}
        self._sent = {layer.layer for layer in layers if layer.is_sent}
        self._room = threading.Semaphore(ahead)
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="read checkpoint", daemon=True)
        self.problems: dict[str, str] = {}
        """By layer: why it could not be read."""

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._room.release()

    def wait(self, layer: str) -> str | None:
        """Wait until a layer is read: None, or why it could not be read. None if there is nothing to read of it."""
        if layer not in self._done:
            return None
        self._done[layer].wait()
        if self._error is not None:
            raise self._error
        return self.problems.get(layer)

    def has_sent(self, layer: str) -> None:
        """Note that the memory of a layer is free again."""
        if layer in self._sent:
            self._room.release()

    def wait_for_all(self) -> None:
        """Wait until everything is read."""
        for layer in self._done:
            self.wait(layer)

    def _run(self) -> None:
        try:
            for layer in self._layers:
                if layer.is_sent:
                    self._room.acquire()
                if self._stopped:
                    return
                try:
                    layer.read()
                except CheckpointError as error:
                    self.problems[layer.layer] = str(error)
                self._done[layer.layer].set()
        except BaseException as error:  # raised where somebody waits
            self._error = error
            for done in self._done.values():
                done.set()
