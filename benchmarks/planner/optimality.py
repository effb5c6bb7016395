"""How often the planner misses a plan: all plans of small clusters, and clusters that become better. No training.

Small clusters have 1 to 4 devices; every plan without tensor parallelism, recomputation and ZeRO stage 1 is tried, and
of other problems every plan with them, or with some of them. Larger clusters have up to 16 devices; each is planned for
as it is, and with more bandwidth, more memory, a faster device and a further device. The best plan must not become
slower.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from benchmarks.common import print_table, read_options
from colossal_hetero.planner.cluster.topology import Device, Node, Topology
from colossal_hetero.planner.solver.search import search
from tests.support.every_plan import EveryPlan, wishes_to_prove
from tests.support.random_clusters import Problem, large_problem, small_problem, whole_space_problem

TOLERANCE = 1e-9
"""Relative difference in time from which a plan counts as slower."""
CHANGES = ("bandwidth", "memory", "speed", "device")
"""What :func:`improved` can improve."""


def best_seconds(problem: Problem, unequal: bool, **wishes: Any) -> float:
    """Predicted time of the planner's best plan; infinite if it finds none."""
    try:
        return search(problem.to_search(unequal=unequal, **wishes), keep=1).best.iteration_seconds
    except ValueError:
        return np.inf


def against_all_plans(count: int, unequal: bool) -> tuple[object, ...]:
    """Row: problems, how many have a plan, how many have a faster one than the planner's, and the worst factor."""
    factors = []
    for seed in range(count):
        problem = small_problem(seed)
        best = EveryPlan(*problem).best_seconds(unequal=unequal)
        if best < np.inf:
            factors.append(best_seconds(problem, unequal) / best)
    return _row("all" if unequal else "equal replicas", count, factors)


def after_improvements(count: int) -> list[tuple[object, ...]]:
    """Rows: as :func:`against_all_plans`, for plans after and before the cluster became better, by change."""
    factors: dict[str, list[float]] = {change: [] for change in CHANGES}
    for seed in range(count):
        problem = large_problem(seed)
        before = best_seconds(problem, True)
        for change in CHANGES if before < np.inf else ():
            better = problem._replace(topology=improved(problem.topology, change, seed))
            factors[change].append(best_seconds(better, True) / before)
    return [_row(change, count, found) for change, found in factors.items()]


def improved(topology: Topology, change: str, seed: int) -> Topology:
    """The cluster with one better network, kind with more memory, faster device, or further device.

    More bandwidth is that of the slowest cards, which then are at most twice as fast. The order of the kinds of cards
    by bandwidth stays the same, because nodes use the kind with the most bandwidth, which need not be the best one.
    """
    random = np.random.default_rng([2, seed])
    devices, nodes = list(topology.devices), list(topology.nodes)
    if change == "bandwidth":
        slowest = min(node.nics[0].bytes_per_second for node in nodes)
        rate = slowest * float(random.choice([1.5, 2.0]))
        nodes = [
            dataclasses.replace(
                node,
                nics=tuple(
                    dataclasses.replace(nic, bytes_per_second=rate) if nic.bytes_per_second == slowest else nic
                    for nic in node.nics
                ),
            )
            for node in nodes
        ]
    elif change == "memory":
        name = devices[int(random.integers(len(devices)))].kind.name
        factor = float(random.choice([1.2, 2.0]))
        devices = [
            dataclasses.replace(
                device, kind=dataclasses.replace(device.kind, memory_bytes=int(device.kind.memory_bytes * factor))
            )
            if device.kind.name == name
            else device
            for device in devices
        ]
    elif change == "speed":
        which = int(random.integers(len(devices)))
        factor = float(random.choice([1.02, 1.1, 1.3]))
        devices[which] = dataclasses.replace(devices[which], speed=devices[which].speed * factor)
    elif random.random() < 0.5:
        like = devices[int(random.integers(len(devices)))]
        node = nodes[int(random.integers(len(nodes)))]
        nodes.append(Node(f"n{len(nodes)}", 0, (len(devices),), node.inside, node.nics))
        devices.append(Device(like.kind, len(nodes) - 1, 0, like.speed))
    else:
        # In the last node, so that the numbers of the others do not change.
        devices.append(dataclasses.replace(devices[-1], speed=float(random.choice([1.0, 0.8]))))
        nodes[-1] = dataclasses.replace(nodes[-1], devices=(*nodes[-1].devices, len(devices) - 1))
    return Topology(tuple(devices), tuple(nodes), topology.clusters)


def against_all_forms(count: int, unequal: bool) -> tuple[object, ...]:
    """Row: as :func:`against_all_plans`, with all that plans can have and with parts of it, by turns."""
    factors = []
    for seed in range(count):
        problem, wishes = whole_space_problem(seed), wishes_to_prove(seed)
        best = EveryPlan(*problem, **wishes).best_seconds(unequal=unequal)
        found = best_seconds(problem, unequal, **wishes)
        # No plan found and none possible counts as equal.
        if min(best, found) < np.inf:
            factors.append(found / best)
    return _row("all" if unequal else "equal replicas", count, factors)


def _row(name: str, count: int, factors: list[float]) -> tuple[object, ...]:
    worse = [factor for factor in factors if factor > 1 + TOLERANCE]
    return name, count, len(factors), len(worse), sum(factor > 1.02 for factor in worse), max(factors, default=1.0)


def main() -> None:
    arguments = read_options(__doc__, small=500, forms=500, large=250)
    columns = ("clusters", "with a plan", "slower", "by more than 2 %", "worst factor")
    print_table(
        "Small clusters: the planner against all plans",
        ("plans", *columns),
        [against_all_plans(arguments.small, unequal) for unequal in (True, False)],
    )
    print_table(
        "\nSmall clusters: the planner against all plans with tensor parallelism, recomputation and ZeRO",
        ("plans", *columns),
        [against_all_forms(arguments.forms, unequal) for unequal in (True, False)],
    )
    print_table(
        "\nLarger clusters: after an improvement against before",
        ("improvement", *columns),
        after_improvements(arguments.large),
    )


if __name__ == "__main__":
    main()
