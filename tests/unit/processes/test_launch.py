"""Ranks that are started on this machine end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from colossal_hetero.common.launch import start_ranks

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for child processes in /proc")

SLEEP = "import time\nfrom colossal_hetero.common.launch import start_ranks\nstart_ranks(2, time.sleep, 60)"


def environment(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended, or belongs to somebody else
        return ""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("ranks_before", [0, 1, 2])
def test_a_signal_ends_the_ranks_and_removes_temporary_files(ranks_before: int, tmp_path: Path) -> None:
    """The signal may also come while ranks are being started."""
    with subprocess.Popen(
        [sys.executable, "-c", SLEEP], env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL
    ) as starter:
        deadline = time.monotonic() + 60
        while len(children(starter.pid)) < ranks_before + (ranks_before > 0):  # also Python's tracker of resources
            assert time.monotonic() < deadline and starter.poll() is None
        starter.send_signal(signal.SIGTERM)
        assert starter.wait(timeout=30) == -signal.SIGTERM
    while [found for found in Path("/proc").glob("[0-9]*/environ") if str(tmp_path) in environment(found)]:
        assert time.monotonic() < deadline, "a rank goes on"
        time.sleep(0.1)
    assert os.listdir(tmp_path) == []


def fail(message: str) -> None:
    raise ValueError(message)


@pytest.mark.parametrize(
    ("run", "arguments", "message"),
    [
        (fail, ["two words"], r"^(rank 1: )?two words$"),
        (fail, ["rank 7: gone"], "^rank 7: gone$"),
        (os._exit, [3], r"^rank [01] ended with status 3; the other ranks were stopped$"),
    ],
)
def test_the_reason_of_a_rank_that_fails(run: Callable, arguments: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start_ranks(2, run, *arguments)
