"""Output of workers: divided into lines wherever the pieces end, with prefixes, and its last lines."""

from __future__ import annotations

import os
import threading

from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.elastic.supervisor.supervise import (
    MAX_LAST_LINES,
    MAX_LINE_BYTES,
    LineSplitter,
    Passage,
    write_all,
)


@given(st.lists(st.text(alphabet="ab\r\n", max_size=6)))
def test_lines_do_not_depend_on_the_pieces(pieces: list[str]) -> None:
    splitter, text = LineSplitter(), "".join(pieces).encode()
    lines = [line for piece in pieces for line in splitter.lines(piece.encode())]
    last = splitter.last_line()
    assert [*lines, *([last] if last else [])] == text.splitlines(keepends=True)
    assert splitter.last_line() == b""


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    splitter = LineSplitter()
    assert splitter.lines(b"a" * MAX_LINE_BYTES) == []
    assert splitter.lines(b"a") == [b"a" * (MAX_LINE_BYTES + 1)]


def test_each_line_gets_the_prefix() -> None:
    reader, writer = os.pipe()
    passage = Passage(writer, "[n/0] ")
    for piece in (b"one\ntw", b"o\r", b"\nthree"):
        passage.pass_on(piece)
    passage.close()
    assert os.read(reader, 100) == b"[n/0] one\n[n/0] two\r\n[n/0] three\n"
    assert passage.last_lines() == ["one", "two", "three"]
    os.close(writer)
    os.close(reader)


def test_a_slow_reader_of_a_stream_that_does_not_block_gets_everything() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # a worker may do this to the terminal that it shares with the supervisor
    text = bytes(range(256)) * 1000  # more than a pipe holds
    pieces: list[bytes] = []
    thread = threading.Thread(target=lambda: pieces.extend(iter(lambda: os.read(reader, 1 << 16), b"")))
    thread.start()
    write_all(writer, text)
    os.close(writer)
    thread.join()
    os.close(reader)
    assert b"".join(pieces) == text


def test_only_the_last_lines_are_kept_and_a_reader_may_go() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    passage = Passage(writer)
    for number in range(50):
        passage.pass_on(b"%d\n" % number)
    write_all(writer, b"nobody reads this")
    full = os.open("/dev/full", os.O_WRONLY)
    write_all(full, b"no space is left")
    os.close(full)
    assert passage.last_lines() == [str(number) for number in range(50 - MAX_LAST_LINES, 50)]
    os.close(writer)
