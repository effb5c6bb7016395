"""Probe as one of several ranks, or start them on this machine. Effects: processes, the network, files."""

from __future__ import annotations

import datetime
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from ..planner.batch_profile import Link

__all__ = ["is_rank", "local_devices", "probe_as_rank", "start_ranks"]

STARTED_HERE = "COLOSSAL_HETERO_STARTED_HERE"
"""Environment variable that a rank has which :func:`start_ranks` started: where the ranks meet."""

LOST_PEER_SECONDS = 10.0
"""How long such a rank that lost another one waits to be ended, so that the reason that is seen is the other's."""

MOST_LINES = 200
"""Of measured links in the head of the file."""


def is_rank() -> bool:
    """Whether a launcher started this process as one of several."""
    return "RANK" in os.environ


def local_devices() -> int:
    """GPUs of this machine; 1 without any: the CPU."""
    import torch

    return max(torch.cuda.device_count(), 1)


def probe_as_rank(out: Path, cluster_of: Sequence[tuple[str, str]], timeout_seconds: float, console: Console) -> None:
    """Measure together with all other ranks; rank 0 shows how far it is, and writes the file.

    Raises:
        ValueError: ranks did not come together, were lost on the way, or cannot be described.
    """
    rank = int(os.environ["RANK"])
    alarm = threading.Timer(timeout_seconds, _give_up, (rank, timeout_seconds))
    alarm.daemon = True
    alarm.start()
    try:
        _probe(rank, out, cluster_of, timeout_seconds, console)
    except RuntimeError as error:  # of which torch's DistError and its kin are
        if STARTED_HERE in os.environ and "failed on rank" not in str(error):
            time.sleep(LOST_PEER_SECONDS)
        raise ValueError(f"rank {rank}: {str(error).splitlines()[0]}") from error
    finally:
        alarm.cancel()


def _give_up(rank: int, timeout_seconds: float) -> None:
    # The main thread may wait inside a library for ever.
    message = f"rank {rank} gave up after {timeout_seconds:g} s: another rank is missing or stands still (--timeout)"
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


def _probe(
    rank: int, out: Path, cluster_of: Sequence[tuple[str, str]], timeout_seconds: float, console: Console
) -> None:
    import torch
    import torch.distributed as dist

    from ..data_parallel.together import destroy_groups
    from ..planner.cluster_file import save_cluster
    from .here import probe_ranks

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"rank {rank} is number {local_rank} on its machine, which has {torch.cuda.device_count()} GPUs; start "
                "one rank per GPU, or probe CPUs with CUDA_VISIBLE_DEVICES= in front of the command"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    say = console.print if rank == 0 else (lambda *_: None)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    try:
        dist.barrier()
        topology, order, links = probe_ranks(device, cluster_of, say)
        # Nobody leaves while somebody still asks the first rank where the others are.
        dist.barrier()
    finally:
        destroy_groups()
    if rank != 0:
        return
    save_cluster(topology, out, _head(links))
    nodes, devices, clusters = len(topology.nodes), len(topology.devices), len(topology.clusters)
    say(f"{out}: devices: {devices}, nodes: {nodes}, clusters: {clusters}")
    for number in dict.fromkeys(device.node for device in topology.devices if device.speed < 1):
        slow = [topology.devices[each] for each in topology.nodes[number].devices if topology.devices[each].speed < 1]
        speeds = ", ".join(f"{device.kind.name} at {device.speed:g}" for device in slow)
        say(f"slower than others of their kind on {topology.nodes[number].name}: {speeds}")
    if order != tuple(range(len(order))):
        hosts = [node.name for node in topology.nodes]
        say(f"ranks are numbered cluster by cluster there: start the machines in the order {', '.join(hosts)}")


def _head(links: Sequence[Link]) -> str:
    lines = [
        f"Written by colossal-hetero probe on {datetime.date.today().isoformat()}.",
        "A device's speed is its share of the fastest one's of its kind, in a matrix product.",
    ]
    if links:
        lines += ["", "Measured between ranks:"]
        lines += [
            f"{link.ranks[0]} - {link.ranks[1]} {link.protocol}: {link.latency_seconds * 1e6:.0f} µs, "
            f"{link.bytes_per_second / 1e9:.3g} GB/s"
            for link in links[:MOST_LINES]
        ]
        if len(links) > MOST_LINES:
            lines.append(f"and {len(links) - MOST_LINES} more")
    return "\n".join(lines)


def start_ranks(count: int, module: str, arguments: Sequence[str]) -> None:
    """Run a module with these arguments as ``count`` ranks of this machine.

    Raises:
        ValueError: one of them failed; the others are ended, and the message says which one it was and why.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    command = [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryDirectory(prefix="probe_") as folder:
        shared = {
            "OMP_NUM_THREADS": str(max(1, cores // count)),
            **os.environ,
            STARTED_HERE: "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
        }
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(count):
                with open(Path(folder, f"errors_{rank}"), "wb") as errors:
                    ranks.append(
                        subprocess.Popen(
                            command,
                            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                            stdout=None if rank == 0 else subprocess.DEVNULL,
                            stderr=errors,
                        )
                    )
            _wait(ranks, Path(folder))
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    while True:
        states = [process.poll() for process in ranks]
        if all(state == 0 for state in states):
            return
        if any(states):
            break
        time.sleep(0.05)
    failed = [rank for rank, state in enumerate(states) if state]
    # One that the system ended explains what the others say.
    rank = min(failed, key=lambda rank: (ranks[rank].returncode > 0, rank))
    status = ranks[rank].returncode
    if status < 0:
        raise ValueError(f"rank {rank} was ended from outside by signal {-status}; the other ranks were stopped")
    lines = Path(folder, f"errors_{rank}").read_text(errors="replace").strip().splitlines()
    reason = lines[-1].removeprefix("Error: ") if lines else f"ended with status {status}"
    # What concerns all of them is said by rank 0.
    raise ValueError(reason if rank == 0 or reason.startswith("rank ") else f"rank {rank}: {reason}")
