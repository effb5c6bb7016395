"""How much a wider search space gains, on the clusters of ``published_clusters``, from times measured on real GPUs.

"Simple" plans have stages of one form. The default may also use recomputation and ZeRO stage 1, and "whole" another
tensor-parallel degree for each kind of GPU. The plugin runs all but the last. All are predicted by one model; the plans
were not run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.common import print_markdown
from benchmarks.planner.published_clusters import DATA, MICRO_BATCHES, published_cases
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.runnable import NoPlanError
from colossal_hetero.planner.cost.tp_groups import DEFAULT, SIMPLE, WHOLE, SearchSpace
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.report.plan_table import layout
from colossal_hetero.planner.search.make_plans import make_plans

SPACES = {"simple": SIMPLE, "default": DEFAULT, "whole": WHOLE}


def timed_plan(
    topology: Topology, profile: ModelProfile, global_batch: int, space: SearchSpace
) -> tuple[Plan | None, float]:
    """The best plan, None if there is none, and the seconds that it took to find it."""
    start = time.perf_counter()
    try:
        ranked = make_plans(
            topology, profile, global_batch=global_batch, micro_batches=MICRO_BATCHES, keep=1, space=space
        )
    except NoPlanError:
        return None, time.perf_counter() - start
    return ranked[0].plan, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the tables (default: %(default)s)")
    parser.add_argument("--global-batch", type=int, default=256, help="sequences per iteration (default: %(default)s)")
    arguments = parser.parse_args()
    rows = []
    for cluster, topology, profile in published_cases(arguments.data):
        found = {name: timed_plan(topology, profile, arguments.global_batch, space) for name, space in SPACES.items()}
        plans = [plan for plan, _ in found.values()]
        best = min(plan.iteration_seconds for plan in plans if plan)
        rows.append(
            [
                cluster,
                profile.name,
                *(f"{plan.iteration_seconds:.2f}" if plan else "no plan" for plan in plans),
                *(f"{plan.iteration_seconds / best:.3f}" if plan else "-" for plan in plans[:2]),
                *(layout(plan) if plan else "-" for plan in plans[1:]),
                *(f"{seconds:.1f}" for _, seconds in found.values()),
            ]
        )
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    ratios = (f"{name} / best" for name in list(SPACES)[:2])
    columns = ["cluster", "model", *(f"{name} [s]" for name in SPACES), *ratios]
    print_markdown(
        f"Predicted seconds per iteration of {arguments.global_batch} sequences in wider search spaces",
        [*columns, "default: plan", "whole: plan", *(f"{name}: planning [s]" for name in SPACES)],
        rows,
    )


if __name__ == "__main__":
    main()
