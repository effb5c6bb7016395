"""How much a wider search space gains, on the clusters of ``memory_of_plans``, from times measured on real GPUs.

"Runnable" is the planner's default plan. "Whole" may also use another tensor-parallel degree for each kind of GPU,
stages whose groups divide micro-batches (width), recomputation and ZeRO stage 1; ZeRO alone is "with ZeRO". What the
whole space uses is named. Both are predicted by one model; the wider plans were not run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.common import print_table
from benchmarks.planner.memory_of_plans import CLUSTERS
from benchmarks.planner.mixed_clusters import DATA, MICRO_BATCHES, MODELS
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.plans.plan import Plan
from colossal_hetero.planner.plans.runnable import NoPlanError
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.published.estimated_times import estimate_times
from colossal_hetero.planner.published.sailor_tables import import_bandwidths, import_gpu_profiles, make_topology
from colossal_hetero.planner.report.plan_table import layout
from colossal_hetero.planner.search.make_plans import make_plans
from colossal_hetero.planner.slots.search_space import RUNNABLE, WHOLE, SearchSpace

SPACES = {"runnable": RUNNABLE, "with ZeRO": SearchSpace(zero_stages=(0, 1)), "whole": WHOLE}


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
    if not (arguments.data / "layer_times.csv").exists():
        sys.exit(f"no measurements in {arguments.data}; give a folder with the published tables with --data")
    opt, neo, large = (import_gpu_profiles(arguments.data, model) for model in (*MODELS, "OPT-30"))
    neo = estimate_times(neo, [opt, large], "GH-96", reference="V100-16", micro_batches=MICRO_BATCHES)
    channels = import_bandwidths(arguments.data)
    rows = []
    for cluster in CLUSTERS:
        topology = make_topology(channels, cluster)
        for profile in (opt, neo):
            if not {kind for kind, _, _ in cluster} <= set(profile.devices):
                continue
            found = {
                name: timed_plan(topology, profile, arguments.global_batch, space) for name, space in SPACES.items()
            }
            runnable, whole = found["runnable"][0], found["whole"][0]
            gain = f"{runnable.iteration_seconds / whole.iteration_seconds:.3f}" if runnable and whole else "-"
            rows.append(
                [
                    " + ".join("{1} × {2} {0}".format(*part) for part in cluster),
                    profile.name,
                    *(f"{plan.iteration_seconds:.2f}" if plan else "no plan" for plan, _ in found.values()),
                    gain,
                    layout(whole) if whole else "-",
                    *(f"{found[name][1]:.1f}" for name in ("runnable", "whole")),
                ]
            )
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    columns = ["cluster", "model", *(f"{name} [s]" for name in SPACES), "runnable / whole", "whole: plan"]
    print_table(
        f"Predicted seconds per iteration of {arguments.global_batch} sequences in wider search spaces",
        [*columns, "planning [s]", "whole [s]"],
        rows,
    )


if __name__ == "__main__":
    main()
