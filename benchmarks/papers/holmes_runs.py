"""Iterations in two clusters with networks of their own, step by step as Holmes (times for its Table 5); needs root.

sudo python -m benchmarks.papers.holmes_runs --out FILE.json

Each of four ranks is a node, a network namespace. Two stages train a ViT in two replicas with ZeRO 1. Ranks of the
second cluster have 160/197 of the first one's share of a core, the speeds of the paper's clusters. All ways take turns
in the same processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.common import read_options
from benchmarks.pipeline import layer_sums
from benchmarks.pipeline.layer_sums import Training, in_turns
from benchmarks.pipeline.namespaces import nodes, run_in_namespaces
from benchmarks.pipeline.nic_groups import ADAPTERS, Case, describe
from colossal_hetero import PlanConfig
from colossal_hetero.common.files import write_json
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.stages.split_methods import HOLMES_ALPHA
from colossal_hetero.testing.stragglers import cpu_quota

DEPTH, MICRO_BATCH, MICRO_BATCHES = 12, 4, 6
SPEEDS = (197, 160)
"""TFLOP/s of a GPU in each cluster (Table 1)."""
QUOTA = 0.45
FAST, SLOW = 400, 200
"""Mbit/s inside a cluster, and between clusters."""
LAUNCHED = ((0, 1), (2, 3))
"""Ranks of each replica's stages, in order of launch: each replica in one cluster, its sums between clusters."""
BY_NIC = ((0, 2), (1, 3))
LARGER = int(HOLMES_ALPHA * DEPTH * SPEEDS[0] / sum(SPEEDS))
STEPS: dict[str, tuple[Any, int, bool]] = {
    "as launched": (LAUNCHED, DEPTH // 2, False),
    "+ groups by NIC": (BY_NIC, DEPTH // 2, False),
    "+ partition": (BY_NIC, LARGER, False),
    "+ overlap, no partition": (BY_NIC, DEPTH // 2, True),
    "+ both": (BY_NIC, LARGER, True),
}
"""By name: ranks of the replicas, blocks of the first stage, and whether communication overlaps with passes."""


def make_plan(replicas: Any, first: int) -> Plan:
    blocks = (first, DEPTH - first)
    shapes = [(list(zip(ranks, blocks, strict=True)), MICRO_BATCHES) for ranks in replicas]
    return layer_sums.make_plan(shapes, MICRO_BATCH)


def measure(topology: Topology, arguments: argparse.Namespace) -> dict[str, float]:
    share = QUOTA * SPEEDS[topology.devices[dist.get_rank()].cluster] / SPEEDS[0]
    planning = PlanConfig(cluster=topology, adapters=ADAPTERS)
    with cpu_quota(share, 100_000):
        trainings = {
            name: Training(
                make_plan(replicas, first),
                planning,
                zero_stage=1,
                overlap_communication=overlap,
                overlap_allgather=overlap,
            )
            for name, (replicas, first, overlap) in STEPS.items()
        }
        return in_turns(trainings, arguments)


def main() -> None:
    arguments = read_options(__doc__, out=Path, rounds=4, iterations=3)
    layer_sums.DEPTH = layer_sums.MODEL["depth"] = DEPTH
    topology = describe(Case(2, 1, 1, 2, 2), FAST, SLOW)
    with nodes([2, 2], FAST, SLOW) as places:
        found = run_in_namespaces(places, measure, topology, arguments)[0]
    write_json(found, arguments.out)
    print(*(f"{name}: {seconds:.3f} s" for name, seconds in found.items()), sep="\n")


if __name__ == "__main__":
    main()
