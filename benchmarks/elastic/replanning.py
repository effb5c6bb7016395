"""How long planning takes after devices have come or gone, and how good the plans are. No training.

Devices that are left seldom fill their nodes. In the rows "whole", all devices of some nodes are there; in the rows
"partly", each is a random choice of the devices of a cluster that is larger by a third. Plans are those that elastic
training makes: they use every device that is there. "held twice" are those for ``min_replicas=2``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.common import print_table, read_options
from benchmarks.planner.autohet_clusters import cluster as gpt_cluster
from benchmarks.planner.autohet_clusters import gpt
from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.cluster.topology import Node, Topology
from colossal_hetero.planner.profile.layer_profile import ModelProfile, load_profile
from colossal_hetero.plugin.hybrid.plan_agreement import best_plan
from colossal_hetero.plugin.plan_config import PlanConfig

HERE = Path(__file__).resolve().parent
CLUSTER, PROFILE = HERE / "a100-v100.toml", HERE.parents[1] / "examples/plans/opt-350-a100-v100.json"
SIZES = (12, 16, 32, 64)
AIMS = {12: 1.0, 64: 1.0}
"""Seconds by number of devices."""
GLOBAL_BATCH = 256


class Case(NamedTuple):
    """What is planned for."""

    name: str
    devices: int
    fill: str
    topology: Topology
    profile: ModelProfile
    min_replicas: int


def repeated(topology: Topology, times: int) -> Topology:
    """The cluster with each of its nodes so many times."""
    devices, nodes = [], list[Node]()
    for node in topology.nodes:
        for number in range(times):
            first = len(devices)
            devices += [dataclasses.replace(topology.devices[each], node=len(nodes)) for each in node.devices]
            ranks = tuple(range(first, len(devices)))
            nodes.append(dataclasses.replace(node, name=f"{node.name}-{number}", devices=ranks))
    return dataclasses.replace(topology, devices=tuple(devices), nodes=tuple(nodes))


def clusters() -> dict[str, tuple[Topology, ModelProfile]]:
    """By name: clusters of at least 86 devices, and a model."""
    a100_v100 = repeated(load_cluster(CLUSTER), 6)
    return {
        "A100, V100; OPT-350": (a100_v100, load_profile(PROFILE)),
        "A100, H800, H20; GPT-3 6.7B": (gpt_cluster((32, 32, 32)), gpt()),
    }


def subset(topology: Topology, size: int, fill: str, random: np.random.Generator) -> frozenset[int]:
    """Which devices are there: whole nodes, or some of a few more nodes."""
    wanted = size if fill == "whole" else -(-size * 4 // 3)
    chosen: list[int] = []
    for number in random.permutation(len(topology.nodes)).tolist():
        if len(chosen) < wanted:
            chosen += topology.nodes[number].devices
    if fill == "whole":
        return frozenset(chosen[:size])
    return frozenset(random.choice(chosen, size, replace=False).tolist())


def cases(count: int, sizes: tuple[int, ...]) -> Iterator[Case]:
    """``count`` random ones for each number of devices and fill, with each number of replicas that is asked for."""
    for name, (topology, profile) in clusters().items():
        for size in sizes:
            for fill in ("whole", "partly"):
                random = np.random.default_rng([size, fill == "whole"])
                for _ in range(count):
                    there = topology.of_devices(subset(topology, size, fill, random))
                    for replicas in (1, 2):
                        yield Case(name, size, fill, there, profile, replicas)


def main() -> None:
    arguments = read_options(__doc__, cases=10, devices=SIZES)
    seconds: dict[tuple[str, int, str, int], list[tuple[float, float]]] = {}
    for case in cases(arguments.cases, arguments.devices):
        planning = PlanConfig(
            cluster=case.topology,
            profile=case.profile,
            global_batch_size=GLOBAL_BATCH,
            min_replicas=case.min_replicas,
            layer_sums=True,
            recompute=False,
            zero_stages=(0,),
        )
        start, start_cpu = time.perf_counter(), time.process_time()
        best_plan(planning, case.topology, case.profile)
        key = case.name, case.devices, case.fill, case.min_replicas
        took = time.perf_counter() - start, time.process_time() - start_cpu
        seconds.setdefault(key, []).append(took)
    rows = []
    for (name, devices, fill, replicas), each in seconds.items():
        (wall, cpu), twice = zip(*each, strict=True), "yes" if replicas > 1 else "no"
        rows.append((name, devices, fill, twice, median(wall), max(wall), median(cpu), AIMS.get(devices, "-")))
    print_table(
        f"Planning after a change, {arguments.cases} choices of devices per row, global batch {GLOBAL_BATCH}",
        (
            "cluster; model",
            "devices",
            "fill",
            "held twice",
            "median [s]",
            "max [s]",
            "processor [s]",
            "aim [s]",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
