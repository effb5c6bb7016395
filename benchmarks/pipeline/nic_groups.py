"""Time of gradient reduction with groups by NIC and with groups in launch order, measured and predicted.

There are two clusters of nodes, which are network namespaces on this machine. Each node has a fast NIC inside its
cluster ("RDMA") and a slow one to all nodes ("Ethernet"). If ranks are numbered by stage, replica and place in the
tensor-parallel group, as Holmes does (section 3), each cluster is a stage. In order of launch they are numbered by
replica, stage and place, so that the replicas of a stage are in both. Ranks are processes that communicate over Gloo.
All data-parallel groups reduce at the same time. Bandwidths are so low that the network, and not the processor,
determines the time.

    sudo python -m benchmarks.pipeline.nic_groups [--gradients MB] [--fast MBIT] [--slow MBIT] [--rounds N]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import print_table, read_options
from benchmarks.pipeline.namespaces import nodes, payload_bytes_per_second, run_in_namespaces
from colossal_hetero.planner.cluster.all_reduce import concurrent_seconds
from colossal_hetero.planner.cluster.group_networks import Adapter, group_network
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.plugin.hybrid.planned_mesh import make_group

CPU = DeviceKind("cpu", 1 << 30, 1e11)
LOOPBACK_BYTES_PER_SECOND = 2e9
ADAPTERS = {kind: Adapter(interface="rdma0") for kind in ("InfiniBand", "RoCE")} | {
    "Ethernet": Adapter(interface="eth0")
}

Groups = list[list[int]]
"""The data-parallel groups of a layout."""


@dataclass(frozen=True)
class Case:
    """The size of both clusters, and the degrees of parallelism."""

    nodes_per_cluster: int
    ranks_per_node: int
    tensor_parallel: int
    pipeline: int
    data_parallel: int

    def data_groups(self, by_nic: bool) -> Groups:
        """The data-parallel groups, ordered by stage and place."""
        stages, replicas, width = self.pipeline, self.data_parallel, self.tensor_parallel
        ranks = np.arange(stages * replicas * width)
        if by_nic:
            ranks = ranks.reshape(stages, replicas, width)
        else:
            ranks = ranks.reshape(replicas, stages, width).swapaxes(0, 1)
        return ranks.swapaxes(1, 2).reshape(-1, replicas).tolist()  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return (
            f"2 × {self.nodes_per_cluster} × {self.ranks_per_node}, "
            f"tp {self.tensor_parallel}, pp {self.pipeline}, dp {self.data_parallel}"
        )


CASES = (Case(2, 1, 1, 2, 2), Case(3, 1, 1, 2, 3), Case(2, 2, 1, 2, 4), Case(2, 2, 2, 2, 2))
"""In the last two cases two rings share a NIC: in the third case only in launch order, in the last in both layouts."""


def describe(case: Case, fast_megabits: float, slow_megabits: float) -> Topology:
    """The topology of the namespaces."""
    devices, machines = [], []
    inside = Channel("loopback", LOOPBACK_BYTES_PER_SECOND)
    ethernet = Channel("Ethernet", payload_bytes_per_second(slow_megabits))
    for cluster, kind in enumerate(("InfiniBand", "RoCE")):
        nics = (Channel(kind, payload_bytes_per_second(fast_megabits)), ethernet)
        for _ in range(case.nodes_per_cluster):
            ranks = tuple(range(len(devices), len(devices) + case.ranks_per_node))
            devices += [Device(CPU, len(machines), cluster)] * case.ranks_per_node
            machines.append(Node(f"node-{len(machines)}", cluster, ranks, inside, nics))
    return Topology(tuple(devices), tuple(machines), ("first", "second"))


def predicted_seconds(topology: Topology, groups: Groups, gradient_bytes: float) -> float:
    """Seconds until the slowest group has reduced its gradients, while all do."""
    return max(concurrent_seconds(topology, groups, [gradient_bytes] * len(groups)))


def run_rank(topology: Topology, layouts: list[Groups], gradient_bytes: float, rounds: int) -> list[list[float]]:
    """Seconds of each all-reduce on this rank, for each layout. The first all-reduce is not counted."""
    groups = []
    for layout in layouts:
        own_group = None
        for ranks in layout:
            group = make_group(ranks, group_network(topology, ranks), adapters=ADAPTERS)
            own_group = group if dist.get_rank() in ranks else own_group
        groups.append(own_group)
    gradients = torch.ones(int(gradient_bytes) // 4)
    seconds: list[list[float]] = [[] for _ in layouts]
    for turn in range(rounds + 1):
        for times, group in zip(seconds, groups, strict=True):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(gradients, group=group)
            taken = time.perf_counter() - start
            # The first all-reduce of each group connects its ranks and is not counted.
            if turn:
                times.append(taken)
            gradients.fill_(1.0)
    return seconds


def measure(case: Case, layouts: list[Groups], topology: Topology, arguments: argparse.Namespace) -> list[float]:
    """Median seconds until the last rank has finished an all-reduce, for each layout."""
    with nodes([case.nodes_per_cluster] * 2, arguments.fast, arguments.slow) as found:
        places = [found[device.node] for device in topology.devices]
        by_rank = run_in_namespaces(places, run_rank, topology, layouts, arguments.gradients * 1e6, arguments.rounds)
    return [median(max(turn) for turn in zip(*ranks, strict=True)) for ranks in zip(*by_rank, strict=True)]


def main() -> None:
    arguments = read_options(__doc__, gradients=16.0, fast=400.0, slow=100.0, rounds=5)
    rows = []
    for case in CASES:
        topology = describe(case, arguments.fast, arguments.slow)
        layouts = [case.data_groups(by_nic) for by_nic in (True, False)]
        measured = measure(case, layouts, topology, arguments)
        predicted = [predicted_seconds(topology, groups, arguments.gradients * 1e6) for groups in layouts]
        ratio, predicted_ratio = measured[1] / measured[0], predicted[1] / predicted[0]
        cells = [f"{took:.3f} ({expected:.3f})" for took, expected in zip(measured, predicted, strict=True)]
        rows.append([case, *cells, f"{ratio:.2f}", f"{predicted_ratio:.2f}", f"{predicted_ratio / ratio - 1:+.1%}"])
    print_table(
        f"{arguments.gradients:g} MB of gradients per rank, {arguments.fast:g} Mbit/s inside a cluster, "
        f"{arguments.slow:g} Mbit/s between clusters",
        [
            "clusters × nodes × ranks",
            "by NIC (predicted) [s]",
            "as launched (predicted) [s]",
            "ratio",
            "predicted ratio",
            "error",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
