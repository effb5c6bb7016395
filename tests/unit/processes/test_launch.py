"""Ranks that are started on this machine end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for child processes in /proc")

SLEEP = (
    "from colossal_hetero.common.launch import start_ranks\n"
    "start_ranks(2, 'timeit', ['-n', '1', '-r', '1', 'import time; time.sleep(60)'])"
)


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
        deadline = time.monotonic() + 30
        # The folder for the ranks' errors is made after the handlers of signals.
        while not os.listdir(tmp_path) or len(children(starter.pid)) < ranks_before:
            assert time.monotonic() < deadline and starter.poll() is None
        starter.send_signal(signal.SIGTERM)
        status = starter.wait(timeout=30)
    assert status == 128 + signal.SIGTERM
    assert not [found for found in Path("/proc").glob("[0-9]*/environ") if str(tmp_path) in environment(found)]
    assert os.listdir(tmp_path) == []
