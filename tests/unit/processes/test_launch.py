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
    "from colossal_hetero.processes.launch import start_ranks\n"
    "start_ranks(2, 'timeit', ['-n', '1', '-r', '1', 'import time; time.sleep(60)'])"
)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_ranks_and_removes_temporary_files(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEP], env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL
    ) as starter:
        deadline = time.monotonic() + 30
        while len(ranks := children(starter.pid)) < 2:
            assert time.monotonic() < deadline and starter.poll() is None
            time.sleep(0.02)
        starter.send_signal(number)
        status = starter.wait(timeout=30)
    assert status == (-number if number == signal.SIGINT else 128 + number)
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert os.listdir(tmp_path) == []
