"""Ranks that are started on this machine end with the process that started them; lost connections."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from colossal_hetero.common.launch import start_ranks
from colossal_hetero.common.ranks import is_lost_connection

on_linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for child processes in /proc")

SLEEP = "import time\nfrom colossal_hetero.common.launch import start_ranks\nstart_ranks(2, time.sleep, 60)"


def environment(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended, or belongs to somebody else
        return ""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@on_linux
def test_a_signal_while_ranks_start_ends_them_and_removes_temporary_files(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEP], env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL
    ) as starter:
        deadline = time.monotonic() + 60
        while len(children(starter.pid)) < 2:  # Python's tracker of resources, and a rank
            assert time.monotonic() < deadline and starter.poll() is None
        starter.send_signal(signal.SIGTERM)
        assert starter.wait(timeout=30) == -signal.SIGTERM
    while [found for found in Path("/proc").glob("[0-9]*/environ") if str(tmp_path) in environment(found)]:
        assert time.monotonic() < deadline, "a rank goes on"
        time.sleep(0.1)
    assert os.listdir(tmp_path) == []


ENDS_BEFORE_ITS_CHILD = """
import os, time
from colossal_hetero.common.launch import end_with_parent
read, write = os.pipe()
if os.fork():
    os.read(read, 1)
else:
    end_with_parent()
    os.write(write, b"1")
    time.sleep(60)
"""


@on_linux
def test_a_process_ends_with_its_parent() -> None:
    """Nobody but the child holds the other end of its output."""
    subprocess.run([sys.executable, "-c", ENDS_BEFORE_ITS_CHILD], stdout=subprocess.PIPE, timeout=30, check=True)


def fail(message: str) -> None:
    raise ValueError(message)


@on_linux
def test_the_reason_of_a_rank_that_fails_is_said() -> None:
    with pytest.raises(ValueError, match=r"^rank 7: gone$"):
        start_ranks(2, fail, "rank 7: gone")


def test_lost_connections_are_told_from_other_errors() -> None:
    for words, is_lost in (
        ("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:30331.", True),
        ("NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or there was a network error", True),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)", True),
        ("NCCL communicator was aborted on rank 0.", True),
        ("Connection reset by peer", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
    ):
        assert is_lost_connection(words) == is_lost
