"""How far plans can be from the best possible, by lower bounds, and the plans that are worth their price. No training.

The clusters and the model are those of ``benchmarks.planner.autohet_clusters``.
"""

from __future__ import annotations

import dataclasses
import time

from benchmarks.common import print_table, read_options
from benchmarks.planner.autohet_clusters import CLUSTERS, cluster, gpt
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.solver.pareto_front import pareto_front
from colossal_hetero.planner.solver.problem import Problem
from colossal_hetero.planner.solver.search import search

GLOBAL_BATCH = 512
PRICES = {"A100-80": 2.2, "H800": 4.5, "H20": 1.6}
"""Dollars per hour and device."""


def priced(topology: Topology) -> Topology:
    """The cluster with prices."""
    nodes = [
        dataclasses.replace(
            node, dollars_per_hour=sum(PRICES[topology.devices[rank].kind.name] for rank in node.devices)
        )
        for node in topology.nodes
    ]
    return dataclasses.replace(topology, nodes=tuple(nodes))


def main() -> None:
    arguments = read_options(__doc__, gpus=tuple(CLUSTERS), seconds=(1.0, 5.0), front=64)
    model = gpt()
    rows = []
    for gpus in arguments.gpus:
        problem = Problem(topology=cluster(CLUSTERS[gpus]), profile=model, global_batch=GLOBAL_BATCH)
        bests = [search(problem, bound_seconds=seconds).best for seconds in arguments.seconds]
        rows.append((f"{gpus:,}", bests[-1].iteration_seconds, *(f"{best.gap:.1%}" for best in bests)))
    print_table(
        "No plan is faster by more than",
        ("GPUs", "iteration [s]", *(f"after {seconds:g} s" for seconds in arguments.seconds)),
        rows,
    )
    start = time.perf_counter()
    machines = priced(cluster(CLUSTERS[arguments.front]))
    front = pareto_front(Problem(topology=machines, profile=model, global_batch=GLOBAL_BATCH))
    took = time.perf_counter() - start
    print_table(
        f"\nPlans that are worth their price, of at most {arguments.front} GPUs; planning took {took:.1f} s",
        ("nodes of A100, H800, H20", "iteration [s]", "dollars per iteration"),
        [(" + ".join(map(str, point.nodes)), point.seconds, point.dollars) for point in front],
    )


if __name__ == "__main__":
    main()
