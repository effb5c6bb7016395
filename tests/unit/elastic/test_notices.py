"""Notices that a machine will be taken away: by signal, by a file, by any of several."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from colossal_hetero.elastic.signals import FileNotice, SignalNotice


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Signals that reach the handler which was there before the notice."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_the_first_signal_is_the_notice_and_a_later_one_has_its_usual_effect(received: list[int]) -> None:
    notice = SignalNotice(same_within_seconds=0.0)
    assert not notice.is_given()
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice.is_given() and received == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice.is_given() and received == [signal.SIGTERM]


def test_a_signal_that_arrives_twice_at_the_same_time_is_one_notice(received: list[int]) -> None:
    notice = SignalNotice(same_within_seconds=60.0)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    assert notice.is_given() and received == []
    notice.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_a_forked_process_ends_by_the_signal() -> None:
    notice = SignalNotice()
    child = os.fork()
    if child == 0:  # as a worker of a data loader
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    notice.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not notice.is_given()


def test_only_the_main_thread_can_wait_for_signals() -> None:
    errors: list[str] = []

    def make() -> None:
        try:
            SignalNotice()
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "main thread" in errors[0] and "FileNotice" in errors[0]


def test_a_file_is_a_notice_that_remains_and_several_ranks_see_it(tmp_path: Path) -> None:
    path = tmp_path / "leave"
    first, second = FileNotice(path), FileNotice(str(path))
    assert not first.is_given() and not second.is_given()
    path.touch()
    assert first.is_given() and second.is_given()
    path.unlink()
    assert first.is_given() and not FileNotice(path).is_given()
