"""Members without training: one that dies before it connects, a store that is lost, a name that is taken."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossal_hetero.elastic.job_store import WorldConnections
from colossal_hetero.elastic.membership import Membership
from colossal_hetero.elastic.world import MembershipError, MembershipTiming, StoreLostError
from tests.support.harness import _context, run_alone

TIMING = MembershipTiming(keep_alive_seconds=0.25, keep_alive_attempts=6, store_limit_seconds=1.5)


def serve(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


@contextmanager
def running(function: Any, *arguments: Any) -> Iterator[tuple[int, Any]]:
    """Another process, which calls ``function`` with a pipe and is killed at the end: its number, and what it sends."""
    receiver, sender = _context.Pipe(duplex=False)
    process = _context.Process(target=function, args=(sender, *arguments), daemon=True)
    process.start()
    try:
        yield process.pid, receiver.recv()
    finally:
        process.kill()
        process.join()


def connect(port: int, rank: int) -> str:
    connections = WorldConnections(size=2)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    cutting = threading.Timer(0.5, connections.cut)
    try:
        cutting.start()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    except RuntimeError as error:
        return str(error)
    return ""


def publish(port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)


def test_a_member_dies_before_it_connects() -> None:
    """Which of two members waits for the other depends on their addresses, so this is tried several times."""
    answers = []
    for _ in range(4):
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        dead = _context.Process(target=publish, args=(server.port,), daemon=True)
        dead.start()
        deadline = time.monotonic() + 20
        while server.num_keys() == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        dead.kill()
        dead.join()
        answers.append(run_alone(connect, 15, port=server.port, rank=0))
    # Nobody waits for ever. Beside other work, two of four calls were seen to return without an error.
    assert any("connectFullMesh failed" in answer for answer in answers), answers


def lose_store(node: str, port: int, store: int, number: int) -> float:
    """Seconds until a member of two knows that the store is lost. A collective raises."""
    member = Membership("127.0.0.1", port, "job", node, min_members=2, max_members=2, timing=TIMING)
    world = member.form()
    member.seal()
    dist.all_reduce(torch.ones(1))
    start = time.monotonic()
    if world.rank == 0:
        os.kill(store, number)
    with pytest.raises(RuntimeError):
        while time.monotonic() < start + 20:
            dist.all_reduce(torch.ones(1))
            time.sleep(0.01)
    with pytest.raises(StoreLostError, match=r"the store at 127\.0\.0\.1:"):
        member.fail("a collective has raised")
    with pytest.raises(StoreLostError):
        member.depart()
    return time.monotonic() - start


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_the_store_is_lost(number: signal.Signals) -> None:
    with running(serve) as (store, port), ThreadPoolExecutor(2) as pool:
        arguments = dict(port=port, store=store, number=int(number))
        members = [pool.submit(run_alone, lose_store, 60, node=node, **arguments) for node in "ab"]
        assert max(member.result() for member in members) < 6 * TIMING.store_limit_seconds


def train_until_warned(pipe: Any, port: int) -> None:
    pipe.send(None)
    member, warned = Membership("127.0.0.1", port, "job", "a", min_members=2, max_members=2, timing=TIMING), list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: warned.append(number))
    member.form()
    while not warned:
        dist.all_reduce(torch.ones(1))
    member.depart()


def watch_the_other(port: int, other: int, number: int) -> Any:
    member = Membership("127.0.0.1", port, "job", "b", min_members=2, max_members=2, timing=TIMING)
    member.form()
    dist.all_reduce(torch.ones(1))
    os.kill(other, number)
    with pytest.raises(RuntimeError):
        while True:
            dist.all_reduce(torch.ones(1))
    time.sleep(2 * TIMING.dead_wait_seconds)
    return member.failure


def failure_after(number: signal.Signals) -> Any:
    with running(serve) as (_, port), running(train_until_warned, port) as (other, _):
        return run_alone(watch_the_other, 60, port=port, other=other, number=int(number))


def test_a_member_that_is_silent_is_dead_and_one_that_departs_is_not() -> None:
    with ThreadPoolExecutor(2) as pool:
        silent, departed = pool.map(failure_after, (signal.SIGSTOP, signal.SIGTERM))
    assert "no sign of life for 1.5 s from a" in silent.reason and departed is None


def hold_name(pipe: Any, port: int) -> None:
    Membership("127.0.0.1", port, "job", "a", max_members=2, timing=TIMING, launcher="torchrun 1").form()
    pipe.send(None)
    signal.pause()


def take_name(port: int) -> str | tuple[str, ...]:
    try:
        member = Membership("127.0.0.1", port, "job", "a", max_members=2, timing=TIMING, launcher="torchrun 2")
        return member.form().nodes
    except MembershipError as error:
        return str(error)


def test_a_second_launcher_with_the_name_of_a_node_is_refused_until_the_first_has_ended() -> None:
    with running(serve) as (_, port):
        with running(hold_name, port):
            refused = run_alone(take_name, 30, port=port)
            assert "node 'a' is already in job 'job': torchrun 1 has this name. Each node of a job needs" in refused
        assert run_alone(take_name, 30, port=port) == ("a",)
