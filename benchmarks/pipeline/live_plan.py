"""A plan that follows the speeds of devices, while CPU quotas come and go; and what it costs when nothing happens.

sudo python -m benchmarks.pipeline.live_plan [--stages 2,3,4] [--phases 1,0.5,1,0.25,1] [--plot FILE]
sudo python -m benchmarks.pipeline.live_plan --stages 2 --phases 1 --iterations 300

The ranks train a ViT in a 1F1B pipeline, each with its share of the two cores, in which the layers were measured. In
each phase another quota holds for one rank (the last one, then the first one, in turns); the program is not told.
In turns with the run that follows, runs with fixed splits train: for each quota the fastest that the planner predicts.
The table has the iterations until layers moved, the time of the move, and the median time of an iteration after it,
beside the fastest fixed split in the same phase. A phase without a change shows the cost.

Needs Linux and write access to cgroups (version 1 or 2).
"""

from __future__ import annotations

import argparse
import itertools
import logging
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (lets Colossal-AI work on a CPU, without its warnings)
from benchmarks.common import print_table, start_ranks
from benchmarks.pipeline.pipeline_stages import Trained, build_model, make_batch
from benchmarks.plans import price_ranks

# isort: split

from colossal_hetero import PlanConfig
from colossal_hetero.cli.probe_ranks import probe_ranks
from colossal_hetero.planner.profile.fitted_profiles import as_profiled
from colossal_hetero.planner.solver.follow import at_measured_speeds
from colossal_hetero.profiling.layer_profiler import profile_layers
from colossal_hetero.testing.stragglers import cpu_quota

SHARE = 1.7
"""Cores that the ranks have together without a slow one, of two."""
CANDIDATES = 4
"""Fixed splits that are tried for each quota."""
PERIOD_US = 8_000
"""Period of the quotas: short against a pass, as a slower device would be."""
SETTLE = 24
"""Iterations of the run that follows after each change of the quotas."""


def split(run: Trained) -> str:
    return "+".join(map(str, run.plugin.plan.layers_per_stage))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2, help="stages, one on each rank (default: %(default)s)")
    parser.add_argument("--phases", default="1,0.5,1,0.25,1", help="share of its speed that a rank has (%(default)s)")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of the ViT (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the ViT (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=4, help="images per micro-batch (default: %(default)s)")
    parser.add_argument("--global-batch", type=int, default=32, help="images per iteration (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=SETTLE, help="iterations of a phase (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each run in a phase (default: %(default)s)")
    parser.add_argument("--candidates", type=int, default=CANDIDATES, help="fixed splits of each quota (%(default)s)")
    parser.add_argument("--plot", type=Path, help="file for a picture of the time of each iteration")
    parser.add_argument("--verbose", action="store_true", help="show what stages take, window by window")
    arguments = parser.parse_args()
    start_ranks(arguments.stages)
    if arguments.verbose:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("colossal_hetero.plugin.hybrid.live_plan").setLevel(logging.DEBUG)
    with ExitStack() as stack:
        measure(arguments, stack)


def measure(arguments: argparse.Namespace, stack: ExitStack) -> None:
    stages, rank = arguments.stages, dist.get_rank()
    share = min(1.0, SHARE / stages)
    quota = stack.enter_context(ExitStack())

    def limit(to: float) -> None:
        quota.close()
        quota.enter_context(cpu_quota(to, PERIOD_US))

    limit(share)
    batch = make_batch(arguments.micro_batch)
    model = build_model(arguments.hidden, arguments.blocks)
    profile = profile_layers(
        model, batch, F.cross_entropy, micro_batches=[arguments.micro_batch], optimizer="adamw"
    ).profile
    topology = probe_ranks(torch.device("cpu"))[0]
    phases = [float(each) for each in arguments.phases.split(",")]
    slowed = [(stages - 1) if number // 2 % 2 == 0 else 0 for number in range(len(phases))]
    planning = PlanConfig(cluster=topology, profile=profile, global_batch_size=arguments.global_batch)
    live = Trained("auto", arguments.hidden, arguments, planning=planning, pp_size=stages)
    known = as_profiled(topology, profile), profile.model_copy(update={"rank_devices": ()})
    candidates: dict[tuple[int, ...], Any] = {}
    for number, phase in enumerate(phases):
        at = at_measured_speeds(known[0], {(slowed[number],): 1 / phase})
        order, sizes = live.plugin.plan.rank_order, {"micro_batch": arguments.micro_batch}
        sizes["global_batch"] = arguments.global_batch
        plans = [
            price_ranks(at, known[1], order, (0, *cut, arguments.blocks), **sizes)
            for cut in itertools.combinations(range(1, arguments.blocks), stages - 1)
        ]
        for plan in sorted(plans, key=lambda plan: plan.iteration_seconds)[: arguments.candidates]:
            candidates.setdefault(plan.layers_per_stage, plan)
    still = PlanConfig(cluster=topology, profile=profile, global_batch_size=arguments.global_batch, follow_speed=False)
    fixed = [Trained(plan, arguments.hidden, arguments, planning=still) for plan in candidates.values()]
    for run in fixed:
        run.iterate()
    history: list[tuple[float, int]] = []
    rows = []
    for number, (phase, slow) in enumerate(zip(phases, slowed, strict=True)):
        if rank == slow:
            limit(share * phase)
        changes = len(live.plugin.plan_changes)
        first = len(history)
        moved_after = None
        for iteration in range(arguments.iterations):
            history.append((live.iterate(), number))
            if len(live.plugin.plan_changes) > changes and moved_after is None:
                moved_after = iteration
        changed = live.plugin.plan_changes[changes:]
        runs = [live, *fixed]
        for run in runs:
            run.seconds = []
        for _ in range(arguments.rounds):
            for run in runs:
                run.iterate()
                run.seconds += [run.iterate() for _ in range(3)]
        later = len(live.plugin.plan_changes) - changes - len(changed)
        best = min(fixed, key=lambda run: median(run.seconds))
        mine, other = median(live.seconds), median(best.seconds)
        equal = median(next((run.seconds for run in fixed if split(run) == split(live)), [float("nan")]))
        rows.append(
            (
                f"rank {slow} × {phase:g}",
                median(seconds for seconds, _ in history[first : first + 4]),
                "–" if moved_after is None else str(moved_after),
                " ".join(f"{change.seconds:.2f} s" for change in changed) or "–",
                split(live),
                mine,
                f"{split(best)}: {other:.3f}",
                f"{mine / other:.3f}",
                f"{mine / equal:.3f}",
                str(later),
            )
        )
        if rank == slow:
            limit(share)
    columns = (
        "phase",
        "iteration before (s)",
        "moved after",
        "time of moves",
        "split",
        "iteration (s)",
        "best fixed",
        "ratio",
        "to the same split, fixed",
        "moves later",
    )
    print_table(f"{stages} stages on {stages} ranks, {share:.2f} of a core each", columns, rows)
    if rank == 0 and arguments.plot is not None:
        draw(arguments.plot, history, phases, slowed)


def draw(path: Path, history: list[tuple[float, int]], phases: list[float], slowed: list[int]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 3.5))
    axis.plot([seconds for seconds, _ in history], linewidth=1)
    for number, phase in enumerate(phases):
        start = next(index for index, (_, each) in enumerate(history) if each == number)
        axis.axvline(start, color="gray", linewidth=0.5)
        axis.text(start + 0.5, axis.get_ylim()[1] * 0.95, f"rank {slowed[number]} × {phase:g}", fontsize=8)
    axis.set(xlabel="iteration", ylabel="seconds")
    axis.set_ylim(bottom=0)
    figure.savefig(path, bbox_inches="tight")


if __name__ == "__main__":
    main()
