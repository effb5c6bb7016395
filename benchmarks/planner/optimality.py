"""How often the planner misses a plan: all plans of small clusters, and clusters that become better. No training.

Small clusters have 1 to 4 devices; every plan without tensor parallelism, recomputation and ZeRO stage 1 is tried, and
of other problems every plan with them, or with some of them. Larger clusters have up to 16 devices; each is planned for
as it is, and with more bandwidth, more memory, a faster device and a further device. The best plan must not become
slower.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.common import print_table
from colossal_hetero.planner.solver.search import search
from tests.support.every_plan import EveryPlan, wishes_to_prove
from tests.support.random_clusters import (
    CHANGES,
    Problem,
    improved,
    large_problem,
    small_problem,
    whole_space_problem,
)

TOLERANCE = 1e-9
"""Relative difference in time from which a plan counts as slower."""


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


def after_improvements(count: int, unequal: bool, change: str) -> tuple[object, ...]:
    """Row: as :func:`against_all_plans`, for plans after and before the cluster became better."""
    factors = []
    for seed in range(count):
        problem = large_problem(seed)
        before = best_seconds(problem, unequal)
        if before < np.inf:
            better = problem._replace(topology=improved(problem.topology, change, seed))
            factors.append(best_seconds(better, unequal) / before)
    return _row(change, count, factors)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=500, help="small clusters (default: 500)")
    parser.add_argument("--forms", type=int, default=500, help="small clusters with other plans (default: 500)")
    parser.add_argument("--large", type=int, default=250, help="larger clusters, 4 changes each (default: 250)")
    parser.add_argument("--equal", action="store_true", help="larger clusters: only plans with equal replicas")
    arguments = parser.parse_args()
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
        [after_improvements(arguments.large, not arguments.equal, change) for change in CHANGES],
    )


if __name__ == "__main__":
    main()
