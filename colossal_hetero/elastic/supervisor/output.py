"""Pass on what workers write: unchanged, or with a prefix for each line; and keep the last lines."""

from __future__ import annotations

import os
import select
from collections import deque

__all__ = ["LineSplitter", "Passage", "write_all"]

MAX_LINE_BYTES = 64 * 1024
MAX_LAST_LINES = 20


class LineSplitter:
    """Divides bytes that arrive in pieces into lines, which keep their ends."""

    def __init__(self) -> None:
        self._rest = b""

    def lines(self, piece: bytes) -> list[bytes]:
        """The lines that are complete now. A line of more than ``MAX_LINE_BYTES`` counts as complete."""
        complete = (self._rest + piece).splitlines(keepends=True)
        self._rest = b""
        # Progress bars end a line with a carriage return. At the end of the bytes, it may be the first half of \r\n.
        if complete and not complete[-1].endswith(b"\n") and len(complete[-1]) <= MAX_LINE_BYTES:
            self._rest = complete.pop()
        return complete

    def last_line(self) -> bytes:
        """What remains when no more bytes come: a line without an end, or nothing."""
        rest, self._rest = self._rest, b""
        return rest


class Passage:
    """The way of one stream of one worker to a stream of the supervisor.

    ``prefix`` is put in front of each line; without one, bytes are passed on unchanged and at once.
    """

    def __init__(self, target: int, prefix: str = "") -> None:
        self._target = target
        self._prefix = prefix.encode()
        self._splitter = LineSplitter()
        self._last_lines: deque[bytes] = deque(maxlen=MAX_LAST_LINES)

    def pass_on(self, piece: bytes) -> None:
        """Write ``piece``, or its complete lines."""
        lines = self._splitter.lines(piece)
        self._last_lines.extend(lines)
        write_all(self._target, b"".join(self._prefix + line for line in lines) if self._prefix else piece)

    def close(self) -> None:
        """Write a last line that has no end."""
        line = self._splitter.last_line()
        if line:
            self._last_lines.append(line)
            if self._prefix:
                write_all(self._target, self._prefix + line.rstrip(b"\r") + b"\n")

    def last_lines(self) -> list[str]:
        """At most ``MAX_LAST_LINES`` lines, the newest last, without their ends."""
        return [line.decode(errors="replace").rstrip("\r\n") for line in self._last_lines]


def write_all(target: int, text: bytes) -> None:
    """Write ``text`` to the file descriptor ``target``. If that is not possible, the rest of the text is dropped.

    Training goes on when nobody reads its output any more, or when the disk is full.
    """
    while text:
        try:
            text = text[os.write(target, text) :]
        except BlockingIOError:
            select.select([], [target], [])
        except OSError:
            return
