"""A plan that follows the speeds of devices, while CPU quotas come and go; and what it costs when nothing happens.

sudo python -m benchmarks.pipeline.live_plan [--stages 2,3,4] [--phases 1,0.5,1,0.25,1] [--plot FILE]
sudo python -m benchmarks.pipeline.live_plan --stages 2 --phases 1 --iterations 300
sudo python -m benchmarks.pipeline.live_plan --network 100 --phases 1,0.1,1

The ranks train a ViT in a 1F1B pipeline, each with its share of the two cores, in which the layers were measured. In
each phase another quota holds for one rank (the last one, then the first one, in turns); the program is not told.
In turns with the run that follows, runs with fixed splits train: for each quota the fastest that the planner predicts.
The table has the iterations until layers moved, the time of the move, and the median time of an iteration after it,
beside the fastest fixed split in the same phase. A phase without a change shows the cost.

With --network two ranks train a small ResNet-18, whose later blocks send smaller messages, on two nodes: network
namespaces with NICs of so many Mbit/s. In each phase they have another share of that (``tc``).

Needs Linux and write access to cgroups (version 1 or 2); with --network root, and iproute2.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (lets Colossal-AI work on a CPU, without its warnings)
from benchmarks.common import print_table, start_ranks
from benchmarks.pipeline.namespace_ranks import run_in_namespaces
from benchmarks.pipeline.namespaces import NodeAddresses, limit_ethernet, nodes, payload_bytes_per_second
from benchmarks.pipeline.pipeline_stages import IMAGE, Trained, build_model, make_batch
from benchmarks.plans import price_ranks

# isort: split

from colossal_hetero import PlanConfig
from colossal_hetero.cli.probe_ranks import probe_ranks
from colossal_hetero.planner.cluster.topology import Channel, Node, Topology
from colossal_hetero.planner.profile.fitted_profiles import as_profiled
from colossal_hetero.planner.solver.follow import at_measured_speeds
from colossal_hetero.profiling.layer_profiler import profile_layers
from colossal_hetero.testing.stragglers import cpu_quota

SHARE = 1.7
"""Cores that the ranks have together without a slow one, of two."""
CANDIDATES = 4
"""Fixed splits that are tried for each quota."""
NETWORK_IMAGE = 256
NETWORK_BURST = "32kb"
"""Less than a message, which would pass at once."""
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
    parser.add_argument("--network", type=float, help="Mbit/s between two nodes, which phases limit")
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
    if arguments.verbose:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("colossal_hetero.plugin.hybrid.live_plan").setLevel(logging.DEBUG)
    if arguments.network is not None:
        arguments.stages = 2
        with nodes([2], arguments.network, arguments.network, NETWORK_BURST) as places:
            run_in_namespaces(places, between_nodes, arguments, places)
        return
    start_ranks(arguments.stages)
    with ExitStack() as stack:
        under_quotas(arguments, stack)


def under_quotas(arguments: argparse.Namespace, stack: ExitStack) -> None:
    share = min(1.0, SHARE / arguments.stages)
    quota = stack.enter_context(ExitStack())

    def limit(slow: int, to: float) -> None:
        if dist.get_rank() == slow:
            quota.close()
            quota.enter_context(cpu_quota(share * to, PERIOD_US))

    limit(dist.get_rank(), 1.0)

    def make_model() -> nn.Module:
        return build_model(arguments.hidden, arguments.blocks)

    def at(topology: Topology, slow: int, phase: float) -> Topology:
        return at_measured_speeds(topology, {(slow,): 1 / phase})

    topology = probe_ranks(torch.device("cpu"))[0]
    title = f"{arguments.stages} stages on {arguments.stages} ranks, {share:.2f} of a core each"
    measure(arguments, topology, make_model, IMAGE, limit, at, title)


def between_nodes(arguments: argparse.Namespace, places: Sequence[NodeAddresses]) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dist.get_rank()]})

    def limit(slow: int, to: float) -> None:
        if dist.get_rank() == 0:
            limit_ethernet(places, arguments.network * to, NETWORK_BURST)
        dist.barrier()

    def make_model() -> nn.Module:
        torch.manual_seed(1)
        return timm.create_model("resnet18", num_classes=10, channels=(16, 32, 64, 128))

    def at(topology: Topology, slow: int, phase: float) -> Topology:
        nic = replace(topology.nodes[0].nics[0], bytes_per_second=payload_bytes_per_second(arguments.network * phase))
        return replace(topology, nodes=tuple(replace(node, nics=(nic,)) for node in topology.nodes))

    probed = probe_ranks(torch.device("cpu"))[0]
    nic = Channel("Ethernet", payload_bytes_per_second(arguments.network), 2e-4)
    two = tuple(Node(f"node {number}", 0, (number,), probed.nodes[0].inside, (nic,)) for number in range(2))
    devices = tuple(replace(device, node=number) for number, device in enumerate(probed.devices))
    topology = Topology(devices, two, probed.clusters[:1])
    title = f"ResNet-18 in two stages on two nodes, {arguments.network:g} Mbit/s between them"
    measure(arguments, topology, make_model, NETWORK_IMAGE, limit, at, title)


def measure(
    arguments: argparse.Namespace,
    topology: Topology,
    make_model: Callable[[], nn.Module],
    image: int,
    limit: Callable[[int, float], None],
    at_share: Callable[[Topology, int, float], Topology],
    title: str,
) -> None:
    stages, rank = arguments.stages, dist.get_rank()
    batch = make_batch(arguments.micro_batch, image)
    profile = profile_layers(
        make_model(), batch, F.cross_entropy, micro_batches=[arguments.micro_batch], optimizer="adamw"
    ).profile
    phases = [float(each) for each in arguments.phases.split(",")]
    slowed = [(stages - 1) if number // 2 % 2 == 0 else 0 for number in range(len(phases))]
    planning = PlanConfig(cluster=topology, profile=profile, global_batch_size=arguments.global_batch)
    live = Trained("auto", arguments.hidden, arguments, make_model(), image, planning=planning, pp_size=stages)
    known = as_profiled(topology, profile), profile.model_copy(update={"rank_devices": ()})
    candidates: dict[tuple[int, ...], Any] = {}
    for number, phase in enumerate(phases):
        at = at_share(known[0], slowed[number], phase)
        order, sizes = live.plugin.plan.rank_order, {"micro_batch": arguments.micro_batch}
        sizes["global_batch"] = arguments.global_batch
        plans = [
            price_ranks(at, known[1], order, (0, *cut, profile.blocks), **sizes)
            for cut in itertools.combinations(range(1, profile.blocks), stages - 1)
        ]
        for plan in sorted(plans, key=lambda plan: plan.iteration_seconds)[: arguments.candidates]:
            candidates.setdefault(plan.layers_per_stage, plan)
    still = PlanConfig(cluster=topology, profile=profile, global_batch_size=arguments.global_batch, follow_speed=False)
    fixed = [
        Trained(plan, arguments.hidden, arguments, make_model(), image, planning=still) for plan in candidates.values()
    ]
    for run in fixed:
        run.iterate()
    history: list[tuple[float, int]] = []
    rows = []
    for number, (phase, slow) in enumerate(zip(phases, slowed, strict=True)):
        limit(slow, phase)
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
                f"rank {slow} × {phase:g}" if arguments.network is None else f"network × {phase:g}",
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
        limit(slow, 1.0)
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
    print_table(title, columns, rows)
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
