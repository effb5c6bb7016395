"""Probe as one of several ranks, or start them on this machine. Effects: processes, the network, files."""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..processes.launch import STARTED_HERE

if TYPE_CHECKING:
    from rich.console import Console

    from ..planner.cluster.link import MeasuredLink

__all__ = ["probe_as_rank"]


LOST_PEER_SECONDS = 10.0
"""How long such a rank that lost another one waits to be ended, so that the reason that is seen is the other's."""

MAX_LINES = 200
"""Of measured links in the head of the file."""


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

    from ..planner.cluster.cluster_file import save_cluster
    from ..processes.every_rank import destroy_groups
    from .probe_ranks import probe_ranks

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


def _head(links: Sequence[MeasuredLink]) -> str:
    lines = [
        f"Written by colossal-hetero probe on {datetime.date.today().isoformat()}.",
        "A device's speed is its share of the fastest one's of its kind, in a matrix product.",
    ]
    if links:
        lines += ["", "Measured between ranks:"]
        lines += [
            f"{link.ranks[0]} - {link.ranks[1]} {link.protocol}: {link.latency_seconds * 1e6:.0f} µs, "
            f"{link.bytes_per_second / 1e9:.3g} GB/s"
            for link in links[:MAX_LINES]
        ]
        if len(links) > MAX_LINES:
            lines.append(f"and {len(links) - MAX_LINES} more")
    return "\n".join(lines)
