"""Notices by a signal or a file; and what a process does first that gets SIGTERM or is aborted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from colossal_hetero.elastic.signals import FileNotice, SignalNotice
from tests.support.paths import REPOSITORY


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
    # One that arrives twice at the same time is one notice.
    notice = SignalNotice(same_within_seconds=60.0)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    assert notice.is_given() and received == [signal.SIGTERM]
    notice.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM] * 2


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
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match=r"main thread.*FileNotice"):
        pool.submit(SignalNotice).result()


def test_a_file_is_a_notice_that_remains_and_several_ranks_see_it(tmp_path: Path) -> None:
    path = tmp_path / "leave"
    first, second = FileNotice(path), FileNotice(str(path))
    assert not first.is_given() and not second.is_given()
    path.touch()
    assert first.is_given() and second.is_given()
    path.unlink()
    assert first.is_given() and not FileNotice(path).is_given()


SCRIPT = """
import ctypes, multiprocessing, os, signal, sys, time
from colossal_hetero.elastic.signals import TerminationWatch

def act():
    print("acted", flush=True)
    if what == "group":
        time.sleep(0.3)
        print(f"the forked process lives: {forked.is_alive()}", flush=True)
        forked.kill()

what = sys.argv[1]
watch = TerminationWatch(act)
if what == "group":
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    forked.start()
    time.sleep(0.3)
if what == "closed":
    watch.close()
if what == "child":
    child = os.fork()
    if child == 0:
        print("ready", flush=True)
        time.sleep(60)
    _, status = os.waitpid(child, 0)
    print(f"child ended by {os.WTERMSIG(status)}", flush=True)
    time.sleep(0.3)
    os._exit(0)
print("ready", flush=True)
ctypes.CDLL(None).pause() if what == "stuck" else time.sleep(60)
ctypes.CDLL(None).sleep(60)
"""


def run(what: str) -> tuple[int, str]:
    """Exit code and output of a process that got SIGTERM, alone or with its process group as from torchrun."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, what], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    number = process.pid
    if what == "child":
        (number,) = map(int, subprocess.check_output(["pgrep", "-P", str(number)], text=True).split())
    subprocess.run(["kill", "-TERM", "--", f"-{number}" if what == "group" else str(number)], check=True)
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


def test_what_a_process_does() -> None:
    ended = 128 + signal.SIGTERM
    for what, code, output in (
        ("stuck", ended, "acted\n"),
        ("sleeping", ended, "acted\n"),
        ("group", ended, "acted\nthe forked process lives: True\n"),
        ("closed", -signal.SIGTERM, ""),
        ("child", 0, f"child ended by {int(signal.SIGTERM)}\n"),
    ):
        assert run(what) == (code, output), what


ABORTING = """
import ctypes, os, sys, threading, time
from colossal_hetero.elastic.signals import AbortWatch

def act():
    time.sleep(0.5)
    print("acted", flush=True)

def abort():
    ctypes.CDLL(None).abort()  # as the watchdogs of two process groups do, without Python's lock

watch, what = AbortWatch(act), sys.argv[1]
if what == "closed":
    watch.close()
if what == "sent":
    os.kill(os.getpid(), 6)  # by the system, for example because the process is stuck
if what != "child" or os.fork() == 0:
    threads = [threading.Thread(target=abort, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    ctypes.CDLL(None).pause()
print(f"child ended by {os.WTERMSIG(os.wait()[1])}", flush=True)
"""


def test_what_a_process_does_that_another_thread_aborts() -> None:
    for what, code, output in (
        ("stuck", -signal.SIGABRT, "acted\n"),
        ("sent", -signal.SIGABRT, "acted\n"),
        ("closed", -signal.SIGABRT, ""),
        ("child", 0, f"child ended by {int(signal.SIGABRT)}\n"),
    ):
        command = [sys.executable, "-X", "faulthandler", "-c", ABORTING, what]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
        assert (ended.returncode, ended.stdout) == (code, output), what
        assert "Fatal Python error: " in ended.stderr  # the other thread may end the process while one writes
