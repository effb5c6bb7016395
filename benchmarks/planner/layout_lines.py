"""Plans of random clusters, written as one line and evaluated: whether the devices that are chosen are as good.

A layout does not say which devices it means. The planner's plans of random clusters, whose networks, speeds and nodes
differ, are written as lines and evaluated again. "Slower" counts the plans whose iteration takes longer than with the
planner's own devices, by more than rounding. As a control, each plan is also evaluated with its own devices, which must
give the same time.
"""

from __future__ import annotations

from benchmarks.common import print_table, read_options
from colossal_hetero.planner.cost.evaluate import evaluate_layout, evaluate_plan
from colossal_hetero.planner.cost.layout_line import layout_of, read_layout, write_layout
from colossal_hetero.planner.solver.problem import Problem
from colossal_hetero.planner.solver.search import search
from tests.support.random_clusters import large_problem, small_problem

ROUNDING = 1e-8


def main() -> None:
    arguments = read_options(__doc__, clusters=60)
    rows = []
    for name, problem in (("1 to 4", small_problem), ("1 to 16", large_problem)):
        ratios, same = [], 0
        for seed in range(arguments.clusters):
            topology, profile, global_batch = problem(seed)
            try:
                plans = search(Problem(topology=topology, profile=profile, global_batch=global_batch), keep=3).plans
            except ValueError:
                continue
            for plan in (ranked.plan for ranked in plans):
                again = evaluate_plan(topology, profile, plan).plan.iteration_seconds
                same += abs(again / plan.iteration_seconds - 1) < ROUNDING
                line = write_layout(layout_of(plan))
                evaluated = evaluate_layout(topology, profile, read_layout(line)).plan.iteration_seconds
                ratios.append(evaluated / plan.iteration_seconds)
        slower = [ratio for ratio in ratios if ratio > 1 + ROUNDING]
        faster = sum(ratio < 1 - ROUNDING for ratio in ratios)
        rows.append([name, len(ratios), same, len(slower), f"{max(ratios):.3f}", faster])
    names = ["devices", "plans", "same with own devices", "slower as a line", "worst factor", "faster as a line"]
    print_table("Plans written as a line and evaluated", names, rows)


if __name__ == "__main__":
    main()
