"""One member with a store in the same process: its environment, who joins, what ends with a world; notices, signals."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from colossalai.cluster import DistCoordinator
from colossalai.shardformer.layer.utils import Randomizer
from torch.distributed import HashStore, distributed_c10d
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _Action,
    _RendezvousState,
)

from colossal_hetero.colossalai_support import cpu
from colossal_hetero.elastic import rendezvous
from colossal_hetero.elastic.environment import (
    ElasticEnvironment,
    TorchrunPlace,
    launcher_name,
    parse_address,
    runs_launcher,
)
from colossal_hetero.elastic.job_store import WorldConnections
from colossal_hetero.elastic.membership import Membership
from colossal_hetero.elastic.process_groups import LaunchedState, ProcessGroups, find_each_other
from colossal_hetero.elastic.rendezvous import described, next_action
from colossal_hetero.elastic.signals import FileNotice, SignalNotice
from colossal_hetero.elastic.world import NEW, JoinTimeoutError, Member, MembershipTiming, StoreLostError, World
from tests.support.harness import free_port, run_alone
from tests.support.paths import REPOSITORY


@pytest.fixture
def port() -> Iterator[int]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port


def test_one_line_says_that_members_are_missing(port, capsys, monkeypatch):
    monkeypatch.setattr(rendezvous, "SECONDS_PER_NOTICE", 0.1)
    member = Membership(
        "127.0.0.1", port, "j", "n", min_members=2, max_members=2, timing=MembershipTiming(join_limit_seconds=0.5)
    )
    with pytest.raises(JoinTimeoutError, match=r"no world formed within 0\.5 s: job j needs at least 2 members"):
        member.form()
    words = "colossal_hetero: waiting up to 0.5 s: job j needs at least 2 members, and 1 came (n)\n"
    assert capsys.readouterr().err == words


def test_wrong_arguments_and_calls(port: int) -> None:
    member = Membership("127.0.0.1", port, "j", "n", max_members=2)
    member.leave()  # nothing to leave
    member.fail("nothing to break")
    assert member.failure is None and not member.is_somebody_waiting()
    with pytest.raises(RuntimeError, match="there is no world"):
        member.seal()
    member.depart()
    with pytest.raises(RuntimeError, match="this process has departed"):
        member.form()
    timing = MembershipTiming(store_limit_seconds=0.3)
    with pytest.raises(StoreLostError, match=r"the store at 127\.0\.0\.1:\d+ does not answer within 0\.3 s"):
        Membership("127.0.0.1", free_port(), "j", "n", max_members=1, timing=timing)
    assert MembershipTiming().dead_wait_seconds == 2.0


SETTINGS = RendezvousSettings("job", 2, 3, RendezvousTimeout(), timedelta(seconds=1), 2)

FIRST, SECOND = Member(-4, 0, 9, "b", 1), Member(-4, 1, 2, "a|x", 1)
OLD, NEW_1, NEW_2 = Member(-3, 0, 1, "c", 1), Member(NEW, 10, 10, "d", 1), Member(NEW, 11, 11, "a", 1)


def state_of(participants: list[Member], waiting: list[Member], spares: list[Member] | None = None) -> _RendezvousState:
    state = _RendezvousState()
    state.round = 5
    state.participants = {described(member): 0 for member in participants}
    state.wait_list = {described(member) for member in waiting}
    state.redundancy_list = {described(member) for member in spares or []}
    return state


def test_what_a_member_that_joins_does_next() -> None:
    sync, add, done = _Action.SYNC, _Action.ADD_TO_PARTICIPANTS, _Action.MARK_RENDEZVOUS_COMPLETE
    for participants, waiting, spares, expected, action in (
        # A world is complete when all expected are there.
        ([FIRST, SECOND], [], [], 2, done),
        ([FIRST, SECOND], [], [], 3, sync),  # one is still on its way
        ([FIRST, SECOND], [NEW_1], [], 2, sync),
        ([FIRST], [], [], 1, sync),  # the world needs two
        ([FIRST, NEW_1], [], [], 1, done),
        ([FIRST, NEW_1], [], [], 2, sync),  # a new member does not stand for a survivor
        ([NEW_1, NEW_2], [], [], 0, sync),  # nobody knows who else comes
        # A spare is waited for if there is a place.
        ([FIRST, SECOND], [], [NEW_1], 2, sync),
        ([FIRST, SECOND, OLD], [], [NEW_1], 2, done),
    ):
        state, node = state_of(participants, waiting, spares), described(participants[0])
        assert next_action(sync, state, node, SETTINGS, expected, may_wait=True) is action, (participants, expected)
    # New members let survivors go first.
    state = state_of([FIRST], [NEW_1])
    for member, expected, may_wait, action in (
        (NEW_1, 2, True, sync),
        (OLD, 2, True, sync),
        (SECOND, 2, True, add),
        (NEW_1, 2, False, add),
        (NEW_1, 1, True, add),
    ):
        assert next_action(add, state, described(member), SETTINGS, expected, may_wait) is action, member
    # Who waits for a full world becomes a spare.
    state = state_of([FIRST, SECOND, OLD], [NEW_1])
    state.complete = True
    action = next_action(sync, state, described(NEW_1), SETTINGS, 0, may_wait=False)
    assert action is _Action.REMOVE_FROM_WAIT_LIST


def limits() -> list[timedelta]:
    return [distributed_c10d._get_default_timeout(backend) for backend in ("gloo", "nccl")]


def enter_and_leave_worlds() -> None:
    os.environ["LOCAL_RANK"] = "0"
    before, groups, launched = limits(), ProcessGroups(7.0), LaunchedState("127.0.0.1", 29400, seed=1)
    for number in range(2):
        groups.initialize(dist.HashStore(), World(0, 1, number, ("a",)))
        assert limits() == [timedelta(seconds=7)] * 2, "of all backends, until groups are destroyed"
        launched.enter(World(0, 1, number, ("a",)))
        coordinator = DistCoordinator()
        names = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
        assert names == ["0", "1", "0", "127.0.0.1", "29400"]
        assert (coordinator.world_size, Randomizer._INDEX, cpu._messages.kept) == (1, 0, 0)
        coordinator._world_size = 9  # as that of an earlier world
        Randomizer.increment_index()
        cpu._messages._sends.append((None, torch.ones(1)))
        launched.leave()
        groups.destroy()
        assert limits() == before


def test_each_world_has_the_state_that_a_launch_leaves() -> None:
    run_alone(enter_and_leave_worlds, 60)  # it changes the environment and the state of Colossal-AI


def connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    return client, server


def is_cut(connection: socket.socket) -> bool:
    connection.settimeout(0.0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.mark.parametrize("sealed", [True, False])
def test_only_connections_of_the_world_are_cut(sealed: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before, _before = connected(listener)
        world = WorldConnections(size=2)
        with socket.create_server(("127.0.0.1", 0)) as own_listener:
            client, server = connected(own_listener)
            unix, other = socket.socketpair()
            if sealed:
                world.seal()
            after, _after = connected(own_listener)
            world.cut()
            world.cut()
            assert is_cut(client) and is_cut(server)
            assert not is_cut(before)
            assert is_cut(after) != sealed
            other.send(b"!")
            assert unix.recv(1) == b"!"
            own_listener.setblocking(False)
            for number in () if sealed else (0, 1):  # in place of members that do not come
                with own_listener.accept()[0] as answer:
                    assert answer.recv(9) == number.to_bytes(8, sys.byteorder)
            with pytest.raises(BlockingIOError):
                own_listener.accept()
            for each in connected(own_listener):  # it still listens
                each.close()
        for each in (before, _before, client, server, unix, other, after, _after):
            each.close()


TORCHRUN = dict(RANK="0", WORLD_SIZE="3", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", GROUP_WORLD_SIZE="1")
TORCHRUN |= dict(MASTER_ADDR="10.0.0.6", MASTER_PORT="29500")
TORCHRUN |= dict(TORCHELASTIC_RUN_ID="vit-7", TORCHELASTIC_USE_AGENT_STORE="True")
JOB = TORCHRUN | dict(COLOSSAL_HETERO_JOB="job-1", COLOSSAL_HETERO_NODE="node.a")
JOB["COLOSSAL_HETERO_STORE"] = "10.0.0.5:29400"


def test_the_place_in_a_job() -> None:
    place = ElasticEnvironment.from_environ(JOB)
    launcher = f"torchrun on {socket.gethostname()} (MASTER_PORT 29500)"
    assert place == ElasticEnvironment("10.0.0.5", 29400, "job-1", "node.a", 1, launcher)
    slurm = JOB | dict(SLURMD_NODENAME="gpu-3")
    assert ElasticEnvironment.from_environ(slurm).node == "node.a"
    del slurm["COLOSSAL_HETERO_NODE"], slurm["COLOSSAL_HETERO_JOB"]
    place = ElasticEnvironment.from_environ(slurm)
    assert (place.node, place.job) == ("gpu-3", "default")
    del slurm["SLURMD_NODENAME"]
    assert ElasticEnvironment.from_environ(slurm).node == socket.gethostname()
    assert parse_address("store.example:29400") == ("store.example", 29400)
    place = ElasticEnvironment.from_environ(JOB | dict(COLOSSAL_HETERO_STORE="[fe80::1%eth0]:1"))
    assert (place.store_host, place.store_port) == ("fe80::1%eth0", 1)


def test_the_place_in_the_world_of_torchrun() -> None:
    environ = TORCHRUN | dict(COLOSSAL_HETERO_NODE="gpu-3")
    assert TorchrunPlace.from_environ(environ) == TorchrunPlace(0, 3, 1, "10.0.0.6", 29500, False, "gpu-3", "vit-7")
    environ = TORCHRUN | dict(TORCHELASTIC_USE_AGENT_STORE="False", COLOSSAL_HETERO_NODE="")
    place = TorchrunPlace.from_environ(environ)
    assert place.hosts_store and place.node == socket.gethostname()
    assert not TorchrunPlace.from_environ(environ | dict(RANK="1")).hosts_store
    for name in ("none", ""):  # a job without a name has that of its launcher
        job = TorchrunPlace.from_environ(TORCHRUN | dict(TORCHELASTIC_RUN_ID=name)).job
        assert job == launcher_name(os.getppid()) and runs_launcher(job)
        number, start = job.split("-")[1:]
        assert not runs_launcher(f"launcher-{number}-{int(start) + 1}")
    assert runs_launcher("a-job-with-a-name")


def test_a_worker_that_does_not_come_is_waited_for_up_to_the_limit() -> None:
    for rank in (0, 1):
        with pytest.raises(RuntimeError, match=rf"not all of 2 workers came within 0.3 s \(this is rank {rank}\)"):
            find_each_other(HashStore(), rank, 2, "a", 0.3)


@pytest.fixture
def received() -> Iterator[list[int]]:
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
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match=r"main thread.*FileNotice"):
        pool.submit(SignalNotice).result()


def test_a_forked_process_ends_by_the_signal() -> None:
    notice = SignalNotice()
    child = os.fork()
    if child == 0:  # as a worker of a data loader
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    notice.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not notice.is_given()


def test_a_file_is_a_notice_that_remains(tmp_path: Path) -> None:
    path = tmp_path / "leave"
    notice = FileNotice(path)
    assert not notice.is_given()
    path.touch()
    assert notice.is_given() and FileNotice(str(path)).is_given()
    path.unlink()
    assert notice.is_given() and not FileNotice(path).is_given()


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


def test_what_a_process_does_that_gets_sigterm() -> None:
    """Alone, or with its process group as from torchrun."""
    ended = 128 + signal.SIGTERM
    for what, code, output in (
        ("stuck", ended, "acted\n"),
        ("sleeping", ended, "acted\n"),
        ("group", ended, "acted\nthe forked process lives: True\n"),
        ("closed", -signal.SIGTERM, ""),
        ("child", 0, f"child ended by {int(signal.SIGTERM)}\n"),
    ):
        command = [sys.executable, "-c", SCRIPT, what]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, start_new_session=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        number = str(process.pid)
        if what == "child":
            number = subprocess.check_output(["pgrep", "-P", number], text=True).strip()
        subprocess.run(["kill", "-TERM", "--", f"-{number}" if what == "group" else number], check=True)
        assert (process.communicate(timeout=30)[0], process.returncode) == (output, code), what


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
        # With several threads, another one may end the process before one has written this.
        assert what != "sent" or "Fatal Python error: " in ended.stderr
