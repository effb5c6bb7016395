"""``colossal-hetero probe``: measure machines and write their cluster file."""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..common.launch import STARTED_HERE, is_rank, local_devices, local_gpu, start_ranks
from . import common

if TYPE_CHECKING:
    from ..planner.cluster.topology import MeasuredLink


LOST_PEER_SECONDS = 10.0
"""Seconds that a rank waits to be ended if it loses another one, so that the user sees the error of the other."""
MAX_LINES = 200  # largest number of measured links in the comment at the top of the file


def probe_as_rank(out: Path, cluster_of: Sequence[tuple[str, str]], timeout_seconds: float) -> None:
    """Measure with all other ranks; rank 0 writes the file. Exits with 1 after ``timeout_seconds``: a rank is
    missing."""
    rank = int(os.environ["RANK"])
    alarm = threading.Timer(timeout_seconds, _give_up, (rank, timeout_seconds))
    alarm.daemon = True
    alarm.start()
    try:
        _probe(rank, out, cluster_of, timeout_seconds)
    except RuntimeError as error:  # the base class of torch's DistError
        if STARTED_HERE in os.environ and "failed on rank" not in str(error):
            time.sleep(LOST_PEER_SECONDS)
        raise ValueError(f"rank {rank}: {str(error).splitlines()[0]}") from error
    finally:
        alarm.cancel()


def _give_up(rank: int, timeout_seconds: float) -> None:
    # The main thread may wait inside a library forever.
    words = f"gave up after {timeout_seconds:g} s: another rank is missing or does not respond (--timeout)"
    print(f"rank {rank} {words}", file=sys.stderr, flush=True)
    os._exit(1)


def _probe(rank: int, out: Path, cluster_of: Sequence[tuple[str, str]], timeout_seconds: float) -> None:
    import torch
    import torch.distributed as dist

    from ..common.ranks import destroy_without_lock
    from ..planner.cluster.cluster_file import save_cluster
    from .probe_ranks import probe_ranks

    device = local_gpu(rank, "probe") or torch.device("cpu")
    say = common.make_console().print if rank == 0 else (lambda *_: None)
    destroy_without_lock()
    limit = datetime.timedelta(seconds=timeout_seconds)
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]), timeout=limit)
    try:
        dist.barrier()
        topology, order, links = probe_ranks(device, cluster_of, say)
        # No rank may leave while another still asks rank 0 for the addresses of the others.
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank != 0:
        return
    save_cluster(topology, out, _head(links))
    nodes, devices, clusters = len(topology.nodes), len(topology.devices), len(topology.clusters)
    say(f"{out}: devices: {devices}, nodes: {nodes}, clusters: {clusters}")
    for number in dict.fromkeys(device.node for device in topology.devices if device.speed < 1):
        slow = [topology.devices[each] for each in topology.nodes[number].devices if topology.devices[each].speed < 1]
        speeds = ", ".join(f"{device.kind.name} at {device.speed:g}" for device in slow)
        say(f"on {topology.nodes[number].name}, slower than the fastest device of the same kind: {speeds}")
    if order != tuple(range(len(order))):
        hosts = [node.name for node in topology.nodes]
        say(f"the file numbers ranks cluster by cluster: start the machines in the order {', '.join(hosts)}")


def _head(links: Sequence[MeasuredLink]) -> str:
    lines = [
        f"Written by colossal-hetero probe on {datetime.date.today().isoformat()}.",
        "The speed of a device is relative to the fastest device of its kind, measured with a matrix product.",
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


def _pairs(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = [value.partition("=") for value in values]
    for value, (host, _, name) in zip(values, pairs, strict=True):
        if not host or not name:
            raise click.BadParameter(f"{value!r} does not have the form HOST=CLUSTER", context, parameter)
    return [(host, name) for host, _, name in pairs]


@click.command()
@common.file_option("--out", "Cluster file to write.", default=Path("cluster.toml"), show_default=True)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Number of ranks to start on this machine; default: one per GPU, or one if there is no GPU.",
)
@click.option(
    "--cluster-of",
    multiple=True,
    metavar="HOST=CLUSTER",
    callback=_pairs,
    help="Put machines whose host name matches the pattern HOST into CLUSTER; default: by their fastest kind of NIC.",
)
@click.option(
    "--timeout", type=common.Finite(min=1), default=600, show_default=True, help="Give up after this number of seconds."
)
def probe(out: Path, nproc: int | None, cluster_of: list[tuple[str, str]], timeout: float) -> None:
    """Measure machines and write their cluster file: devices, memory, speed, latency and bandwidth between devices.

    Without a launcher it measures this machine. To measure several machines, start it on each with a launcher:

    torchrun --nnodes ... --nproc-per-node ... -m colossal_hetero.cli.main probe --out cluster.toml
    """
    with common.errors_on_one_line():
        common.check_outputs(out)
        if is_rank():
            if nproc is not None:
                raise ValueError("a launcher has already started the ranks; leave out --nproc, which starts ranks too")
            probe_as_rank(out, cluster_of, timeout)
        else:
            start_ranks(nproc or local_devices(), probe_as_rank, out, cluster_of, timeout)
