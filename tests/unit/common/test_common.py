"""Files that are replaced at once; ranks end with the process that started them; lost connections."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from colossal_hetero.common.atomic_files import check_writable, replacing
from colossal_hetero.common.launch import start_ranks
from colossal_hetero.common.ranks import is_lost_connection


def write(path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text("new")


def test_a_file_is_replaced_and_keeps_its_mode_and_after_an_error_it_is_as_before(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o640)
    with pytest.raises(KeyError), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]
    write(path)
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("exists", [True, False])
def test_links_and_devices_stay(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    link, target = tmp_path / "link.json", folder / "plan.json"
    if exists:
        target.write_text("old")
    link.symlink_to(Path("folder") / "plan.json")
    for path in (link, Path("/dev/null")):
        check_writable(path)
        write(path)
    assert link.is_symlink() and target.read_text() == "new"
    assert os.listdir(folder) == ["plan.json"]
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_standard_output_can_be_written_to_a_file_or_a_pipe(tmp_path: Path) -> None:
    code = (
        "from colossal_hetero.common.atomic_files import replacing\n"
        "print('before', flush=True)\n"
        "with replacing('/dev/stdout') as path: path.write_text('content\\n')\n"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "before\ncontent\n"
    with (tmp_path / "output").open("a") as output:
        subprocess.run(command, stdout=output, check=True)
    assert (tmp_path / "output").read_text() == "before\ncontent\n"


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
