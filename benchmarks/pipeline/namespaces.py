"""Several nodes on one machine: network namespaces with NICs of limited bandwidth, bridges as switches, and ranks.

Each node has the NIC "eth0" on a bridge that all nodes share, and "rdma0" on the bridge of its cluster. Token bucket
filters at both ends of a cable limit what a NIC sends and receives. Needs root and iproute2 (``ip``, ``tc``).
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448
"""Bytes of a full TCP segment with time stamps: the whole frame, and its payload. The filters count frames."""
CLONE_NEWNET = 0x40000000
"""Flag of ``setns``: the namespace is a network namespace."""
BURST = "256kb"
"""Bytes that a filter may pass at once. With fewer bytes, a filter on a busy processor would not reach hundreds of
Mbit/s. Messages that are not much longer pass too fast."""

PORT = 29617
"""Port of rank 0, at which ranks meet. Each node has its own ports, so it cannot be in use."""

T = TypeVar("T")


@dataclass(frozen=True)
class NodeAddresses:
    """A node: its network namespace and the IP addresses of its two NICs."""

    namespace: str
    ethernet: str
    rdma: str


def payload_bytes_per_second(megabits: float) -> float:
    """Bytes per second that a program can send through a NIC of ``megabits`` Mbit/s."""
    return megabits * 1e6 / 8 * PAYLOAD_BYTES / FRAME_BYTES


def missing() -> str | None:
    """Why namespaces cannot be made on this machine; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(absent)} (iproute2) not found" if absent else None


@contextmanager
def nodes(
    clusters: Sequence[int], rdma_megabits: float, ethernet_megabits: float, burst: str = BURST
) -> Iterator[list[NodeAddresses]]:
    """Make ``clusters[c]`` nodes for each cluster c, with NICs of these bandwidths; remove them at the end.

    Ends the program if this machine cannot.
    """
    if reason := missing():
        sys.exit(f"cannot measure: {reason}")
    prefix = f"nic{os.getpid()}"
    switch = f"{prefix}-switch"
    made: list[str] = []

    def add(namespace: str) -> None:
        _run("ip", "netns", "add", namespace)
        made.append(namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")

    try:
        add(switch)
        for number in range(len(clusters) + 1):
            _run("ip", "-n", switch, "link", "add", f"bridge{number}", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", f"bridge{number}", "up")
        found = []
        for cluster, count in enumerate(clusters):
            for _ in range(count):
                node = len(found)
                name = f"{prefix}-{node}"
                add(name)
                ethernet, rdma = f"10.213.0.{node + 1}", f"10.213.{cluster + 1}.{node + 1}"
                _cable(name, "eth0", ethernet, switch, f"e{node}", "bridge0", ethernet_megabits, burst)
                _cable(name, "rdma0", rdma, switch, f"r{node}", f"bridge{cluster + 1}", rdma_megabits, burst)
                found.append(NodeAddresses(name, ethernet, rdma))
        yield found
    finally:
        for namespace in made:
            _run("ip", "netns", "del", namespace)


def _cable(node: str, nic: str, address: str, switch: str, port: str, bridge: str, megabits: float, burst: str) -> None:
    _run("ip", "link", "add", nic, "netns", node, "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", node, "addr", "add", f"{address}/24", "dev", nic)
    _run("ip", "-n", switch, "link", "set", port, "master", bridge)
    for namespace, end in ((node, nic), (switch, port)):
        _run("ip", "-n", namespace, "link", "set", end, "up")
        _limit("add", namespace, end, megabits, burst)


def limit_ethernet(places: Sequence[NodeAddresses], megabits: float, burst: str = BURST) -> None:
    """Give the NICs "eth0" of nodes that :func:`nodes` has made another bandwidth."""
    switch = places[0].namespace.rpartition("-")[0] + "-switch"
    for node, place in enumerate(places):
        for namespace, end in ((place.namespace, "eth0"), (switch, f"e{node}")):
            _limit("change", namespace, end, megabits, burst)


def _limit(how: str, namespace: str, end: str, megabits: float, burst: str) -> None:
    rate = ("tbf", "rate", f"{megabits}mbit", "burst", burst, "latency", "100ms")
    _run("tc", "-n", namespace, "qdisc", how, "dev", end, "root", *rate)


def enter(namespace: str) -> None:
    """Move this thread, and the threads that it starts, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as handle:
        if libc.setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def run_in_namespaces(places: Sequence[NodeAddresses], function: Callable[..., T], *arguments: Any) -> list[T]:
    """Call ``function(*arguments)`` on one rank for each place; its results, by rank.

    Ranks are forked from this process and have one thread each. Their default process group uses the NIC "eth0", and so
    do groups that ``function`` makes without another choice. Results must be picklable.

    Args:
        places: the node of each rank.

    Raises:
        RuntimeError: a rank failed. Each rank that stopped has printed its traceback.
    """
    context = mp.get_context("fork")
    pipes, processes = [], []
    for rank in range(len(places)):
        receiver, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=_rank, args=(sender, rank, places, function, arguments), daemon=True))
        processes[-1].start()
        sender.close()
        pipes.append(receiver)
    try:
        return [_receive(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("a rank failed; the tracebacks of all ranks that stopped are printed above") from None


def _rank(
    pipe: Connection,
    rank: int,
    places: Sequence[NodeAddresses],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Connect this process to the others, and send the result of ``function`` through ``pipe``."""
    try:
        enter(places[rank].namespace)
        torch.set_num_threads(1)
        local_rank = places[:rank].count(places[rank])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(len(places))}
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        master = f"tcp://{places[0].ethernet}:{PORT}"
        dist.init_process_group("gloo", master, timedelta(minutes=5), world_size=len(places), rank=rank)
        result = function(*arguments)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(result)
    except BaseException:
        traceback.print_exc()
    finally:
        # Exit without the clean-up of the parent process, which this process inherited.
        sys.stdout.flush()
        os._exit(0)
