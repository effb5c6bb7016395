"""`colossal-hetero launch` and `store` as real processes; the workers are scripts that do nothing but wait or end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from colossal_hetero.cli.main import main
from colossal_hetero.elastic.job_store import start_store
from tests.support.command_line import failure
from tests.support.harness import forked_context, free_port
from tests.support.launched_nodes import LaunchedNode, is_running, wait_until

START = """
import os, signal, subprocess, sys, time
folder, rank = sys.argv[1], os.environ["LOCAL_RANK"]
def note(name, text=""):
    with open(os.path.join(folder, name), "a") as file:
        file.write(str(text) + "\\n")
def wait_for(name):
    while not os.path.exists(os.path.join(folder, name)):
        time.sleep(0.01)
"""
"""Begin of each script. A worker notes that it has started only when its signal handlers are there."""

WAIT = "\nnote('started.' + rank, os.getpid())\nwait_for('end')\n"


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    server, address = start_store("127.0.0.1", 0)
    yield address
    del server


def started(node: LaunchedNode, workers: int = 2, times: int = 1) -> None:
    wait_until(lambda: all(len(node.starts(rank)) >= times for rank in range(workers)), "all workers have started")


def test_a_killed_worker_starts_again_and_the_other_one_goes_on(tmp_path: Path, store: str) -> None:
    script = "\nnote('helper.' + rank, subprocess.Popen(['sleep', '300']).pid)\n"
    with LaunchedNode(tmp_path, START + script + WAIT, store, "--node", "a", "--nproc", 2) as node:
        started(node)
        (untouched,), (killed,) = node.starts(0), node.starts(1)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: len(node.starts(1)) == 2, "worker 1 has started again")
        assert node.starts(0) == [untouched] and is_running(untouched)
        helpers = [[int(line) for line in (tmp_path / f"helper.{rank}").read_text().split()] for rank in (0, 1)]
        assert [list(map(is_running, each)) for each in helpers] == [[True], [False, True]]
        (tmp_path / "end").touch()
        code, output, errors = node.end()
    assert (code, output) == (0, "")
    ended = f"worker 1 (process {killed}) ended with signal 9 (SIGKILL); started again, restart 1 of 3"
    assert errors == f"colossal-hetero launch: {ended}\n"


def test_after_too_many_restarts_the_node_ends_with_the_status_of_the_worker(tmp_path: Path, store: str) -> None:
    script = """
if rank == "0":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
note("started." + rank, os.getpid())
if rank == "1":
    wait_for("started.0")
    print("two\\nlines", file=sys.stderr)
    sys.exit(7)
time.sleep(60)
"""
    with LaunchedNode(tmp_path, START + script, store, "--node", "b", "--nproc", 2, "--max-restarts", 2) as node:
        code, output, errors = node.end()
        assert (code, output) == (7, "")
        assert len(node.starts(0)) == 1 and len(node.starts(1)) == 3
    assert errors.count("[b/1] two\n[b/1] lines\n") == 3
    *_, heading, first, second = errors.splitlines()
    assert heading.endswith("ended with exit status 7 after 2 restarts (--max-restarts); the last lines of its stderr:")
    assert [first, second] == ["colossal-hetero launch:   two", "colossal-hetero launch:   lines"]


@pytest.mark.parametrize("killed", ["the group of the user", "the parent of the workers"])
def test_when_a_supervising_process_is_killed_no_process_is_left(tmp_path: Path, store: str, killed: str) -> None:
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for in_own_session in (False, True):
    subprocess.Popen(["sleep", "300"], start_new_session=in_own_session)
"""
    with LaunchedNode(tmp_path, START + script + WAIT, store, "--node", killed.replace(" ", "_"), "--nproc", 2) as node:
        started(node)
        assert len(node.processes()) == 8  # 2 that supervise, 2 workers, 4 that these have started
        guard, parent = node.process.pid, node.supervising_process()
        if killed == "the group of the user":
            os.killpg(guard, signal.SIGKILL)
        else:
            os.kill(parent, signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, node.processes())), "no process is left")
        code, _, _ = node.end()
    assert code == (-9 if killed == "the group of the user" else 137)


def test_what_a_killed_worker_has_shared_is_removed(tmp_path: Path, store: str) -> None:
    script = """
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=1)
remover = resource_tracker._resource_tracker._pid  # removes the memory after the end of its owner
def is_ready():
    with open(f"/proc/{remover}/status") as file:
        ignored = next(int(line.split()[1], 16) for line in file if line.startswith("SigIgn:"))
    return ignored >> signal.SIGTERM - 1 & 1
while not is_ready():
    time.sleep(0.01)
note("memory", memory.name)
"""
    with LaunchedNode(tmp_path, START + script + WAIT, store, "--node", "sharing") as node:
        started(node, workers=1)
        os.kill(node.starts(0)[0], signal.SIGKILL)
        started(node, workers=1, times=2)
        first, second = (tmp_path / "memory").read_text().split()
        assert not Path("/dev/shm", first).exists() and Path("/dev/shm", second).exists()
        node.process.kill()
        wait_until(lambda: not any(map(is_running, node.processes())), "no process is left")
    assert not Path("/dev/shm", second).exists()


def test_when_both_supervising_processes_are_killed_no_worker_is_left(tmp_path: Path, store: str) -> None:
    with LaunchedNode(tmp_path, START + WAIT, store, "--node", "both", "--nproc", 2) as node:
        started(node)
        parent = node.supervising_process()
        node.process.send_signal(signal.SIGSTOP)  # so that it cannot react
        os.kill(parent, signal.SIGKILL)
        node.process.kill()
        wait_until(lambda: not any(map(is_running, node.processes())), "no process is left")


def test_workers_go_on_without_the_store_and_end_when_the_name_is_lost(tmp_path: Path) -> None:
    server, address = start_store("127.0.0.1", 0)
    with LaunchedNode(tmp_path, START + WAIT, address, "--node", "n") as node:
        assert node.process.stderr is not None
        started(node, workers=1)
        del server
        assert b"the store cannot be reached" in node.process.stderr.readline()
        server, _ = start_store("127.0.0.1", int(address.partition(":")[2]))
        assert b"the store can be reached again" in node.process.stderr.readline()
        assert is_running(node.starts(0)[0])
        server.set("colossal_hetero/nodes/default/n", "1 abc process 5 on elsewhere")
        code, _, errors = node.end()
    assert code == 143 and "process 5 on elsewhere has this name" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_forwarded_and_late_workers_are_killed(tmp_path: Path, store: str, number: int) -> None:
    script = """
def leave(number, frame):
    note("signals." + rank, number)
    if rank == "0":
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, leave)
helper = subprocess.Popen(["sleep", "300"])
note("started." + rank, os.getpid())
while True:
    time.sleep(0.1)
    assert rank == "1" or helper.poll() is None, "the signal is for the worker, not for processes that it has started"
"""
    options = ("--node", f"signal_{number}", "--nproc", 2, "--grace", 0.5)
    with LaunchedNode(tmp_path, START + script, store, *options) as node:
        started(node)
        for process in node.processes() if number == signal.SIGINT else [node.process.pid]:
            # Ctrl+C and some managers of services send a signal to every process that they know.
            if process in (node.process.pid, node.supervising_process()):
                os.kill(process, number)
        code, _, errors = node.end()
        assert not node.processes()
    assert code == 137
    assert [(tmp_path / f"signals.{rank}").read_text() for rank in (0, 1)] == [f"{number:d}\n"] * 2
    assert errors == "colossal-hetero launch: worker 1 is killed: it did not end within 0.5 s (--grace)\n"


def test_a_warned_node_ends_with_0(tmp_path: Path, store: str) -> None:
    script = """
from colossal_hetero.elastic.notices import SignalNotice
notice = SignalNotice()
note("started." + rank, os.getpid())
while not notice.is_given():
    time.sleep(0.01)
"""
    with LaunchedNode(tmp_path, START + script, store, "--node", "warned", "--nproc", 2, "--module") as node:
        started(node)
        node.process.send_signal(signal.SIGTERM)
        assert node.end() == (0, "", "")


def test_a_second_node_with_the_same_name_is_refused(tmp_path: Path, store: str) -> None:
    (tmp_path / "second").mkdir()
    with LaunchedNode(tmp_path, START + WAIT, store, "--node", "c") as node:
        started(node, workers=1)
        with LaunchedNode(tmp_path / "second", START + WAIT, store, "--node", "c") as second:
            code, _, errors = second.end()
            assert code == 2 and not second.starts(0)
        error = errors.splitlines()[-1]
        assert error.startswith(f"Error: node 'c' is already in job 'default': process {node.process.pid} on ")
        assert error.endswith("give another one with --node, or another job with --job")
        with LaunchedNode(tmp_path / "second", START + WAIT, store, "--node", "c", "--job", "other") as second:
            started(second, workers=1)
            second.process.send_signal(signal.SIGTERM)
            assert second.end()[0] == 143  # a worker without a notice ends by the signal
        assert node.processes()
        (tmp_path / "end").touch()
        assert node.end()[0] == 0
    # The name was given back, so nobody waits until a lease is over.
    with LaunchedNode(tmp_path, START + WAIT, store, "--node", "c") as node:
        assert node.end() == (0, "", "")


@pytest.mark.parametrize("workers", [1, 2])
def test_output_has_a_prefix_if_there_are_several_workers(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "of another launcher")
    script = """
names = "COLOSSAL_HETERO_STORE COLOSSAL_HETERO_JOB COLOSSAL_HETERO_NODE LOCAL_WORLD_SIZE OMP_NUM_THREADS MASTER_ADDR"
print(*(os.environ.get(name) for name in names.split()), *sys.argv[2:])
sys.stderr.write("10 %\\r20 %\\n")
sys.stdout.write("no end")
"""
    with LaunchedNode(tmp_path, START + script, store, "--job", "j", "--node", "d", "--nproc", workers) as node:
        code, output, errors = node.end()
    words = f"{store} j d {workers} 1 None"
    assert code == 0
    if workers == 1:
        assert (output, errors) == (f"{words}\nno end", "10 %\r20 %\n")
    else:
        lines = [f"[d/{rank}] {line}" for rank in (0, 1) for line in (words, "no end")]
        assert sorted(output.splitlines()) == sorted(lines)
        assert sorted(errors.split("\n")[:-1]) == [f"[d/{rank}] 10 %\r[d/{rank}] 20 %" for rank in (0, 1)]


def test_a_missing_store_is_named(tmp_path: Path) -> None:
    port = free_port()
    script = tmp_path / "script.py"
    script.touch()
    address = f"127.0.0.1:{port}"
    line = failure("launch", "--store", address, "--store-timeout", 0.3, script)
    assert f"the store at {address} could not be reached within 0.3 s" in line and "Connection refused" in line


def test_what_cannot_be_launched_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    assert "there is no script 'absent.py'" in failure("launch", "--store", "a:1", "absent.py")
    assert "'nowhere' does not have the form HOST:PORT" in failure("launch", "--store", "nowhere", script)
    assert "No such option" in failure("launch", "--store", "a:1", "--nprocs", 2, script)
    assert "'a b' cannot be the name of a node" in failure("launch", "--store", "a:1", "--node", "a b", script)


def run_store(arguments: list[str]) -> None:
    main(["store", *arguments], prog_name="colossal-hetero")


@pytest.mark.parametrize(("number", "options"), [(signal.SIGTERM, []), (signal.SIGINT, ["--host", "127.0.0.1"])])
def test_the_store_runs_until_a_signal_comes(number: int, options: list[str], tmp_path: Path) -> None:
    port = free_port()
    process = forked_context().Process(target=run_store, args=([*options, "--port", str(port)],))
    process.start()
    try:
        script = tmp_path / "script.py"
        script.touch()
        with LaunchedNode(tmp_path, START, f"127.0.0.1:{port}") as node:  # waits until the store is there
            assert node.end() == (0, "", "")
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def test_an_address_where_no_store_can_listen_is_refused(store: str) -> None:
    host, port = store.split(":")
    assert f"no store can listen on {store}: Address already in use" in failure("store", "--host", host, "--port", port)
    assert "port 65536 does not exist; valid are 1 to 65535" in failure("store", "--port", 65536)
