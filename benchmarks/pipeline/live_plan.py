"""A plan that follows the speeds of devices, while CPU quotas come and go; and what it costs when nothing happens.

sudo python -m benchmarks.pipeline.live_plan [--stages 2] [--phases 1 0.5 1 0.25 1]
sudo python -m benchmarks.pipeline.live_plan --phases 1 --iterations 300
sudo python -m benchmarks.pipeline.live_plan --network 100 --phases 1 0.1 1

The ranks train a ViT in a 1F1B pipeline, each with its share of the two cores, in which the layers were measured. In
each phase another quota holds for one rank (the last one, then the first one, in turns); the program is not told. In
turns with the run that follows, runs with fixed splits train: for each quota the fastest that the planner predicts. The
table has the iterations until layers moved, the time of the move, and the median time of an iteration after it, beside
the fastest fixed split in the same phase. A phase without a change shows the cost.

With --network two ranks train a small ResNet-18, whose later blocks send smaller messages, on two nodes: network
namespaces with NICs of so many Mbit/s. In each phase they have another share of that (``tc``).
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

import timm
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import describe_machine, make_vit, read_options, start_ranks, take_turns
from benchmarks.pipeline.namespaces import (
    NodeAddresses,
    limit_ethernet,
    nodes,
    payload_bytes_per_second,
    run_in_namespaces,
)
from benchmarks.pipeline.trained import Trained, measure_layers
from benchmarks.plans import price_ranks
from colossal_hetero import PlanConfig
from colossal_hetero.cli.probe_ranks import probe_ranks
from colossal_hetero.planner.cluster.topology import Channel, Node, Topology
from colossal_hetero.planner.profile.fitted_profiles import as_profiled
from colossal_hetero.planner.solver.follow import at_measured_speeds
from colossal_hetero.testing.stragglers import cpu_quota

SHARE = 1.7
"""Cores that the ranks have together without a slow one, of two."""
HIDDEN, BLOCKS = 128, 8
NETWORK_IMAGE = 256
NETWORK_BURST = "32kb"
"""Less than a message, which would pass at once."""
PERIOD_US = 8_000
"""Period of the quotas: short against a pass, as a slower device would be."""


def show(*cells: object) -> None:
    """A row of the table, at once, because a phase takes a minute."""
    if dist.get_rank() == 0:
        row = " | ".join(f"{each:.3f}" if isinstance(each, float) else str(each) for each in cells)
        print(f"| {row} |", flush=True)


def split(run: Trained) -> str:
    return "+".join(map(str, run.plugin.plan.layers_per_stage))


def main() -> None:
    arguments = read_options(
        __doc__,
        stages=2,
        phases=(1.0, 0.5, 1.0, 0.25, 1.0),
        network=float,
        micro_batch=4,
        global_batch=32,
        iterations=24,
        rounds=3,
        candidates=4,
        verbose=False,
    )
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
        return make_vit(HIDDEN, BLOCKS)

    def at(topology: Topology, slow: int, phase: float) -> Topology:
        return at_measured_speeds(topology, {(slow,): 1 / phase})

    topology = probe_ranks(torch.device("cpu"))[0]
    title = f"{arguments.stages} stages on {arguments.stages} ranks, {share:.2f} of a core each"
    measure(arguments, topology, make_model, 32, limit, at, title)


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
    stages = arguments.stages
    profile = measure_layers(make_model(), arguments.micro_batch, image)
    phases = arguments.phases
    slowed = [(stages - 1) if number // 2 % 2 == 0 else 0 for number in range(len(phases))]
    planning = PlanConfig(cluster=topology, profile=profile, global_batch_size=arguments.global_batch)
    live = Trained("auto", make_model(), image, planning=planning, pp_size=stages)
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
    fixed = [Trained(plan, make_model(), image, planning=still) for plan in candidates.values()]
    for run in fixed:
        run.iterate()
    if dist.get_rank() == 0:
        print(f"{title}; {describe_machine()}")
    show(
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
    show(*["---"] * 10)
    for phase, slow in zip(phases, slowed, strict=True):
        limit(slow, phase)
        changes = len(live.plugin.plan_changes)
        history, moved_after = [], None
        for iteration in range(arguments.iterations):
            history.append(live.iterate())
            if len(live.plugin.plan_changes) > changes and moved_after is None:
                moved_after = iteration
        changed = live.plugin.plan_changes[changes:]
        runs = [live, *fixed]
        for run in runs:
            run.seconds = []
        take_turns(runs, 0, arguments.rounds, 3)
        later = len(live.plugin.plan_changes) - changes - len(changed)
        best = min(fixed, key=lambda run: run.median_seconds)
        mine, other = live.median_seconds, best.median_seconds
        equal = next((run.median_seconds for run in fixed if split(run) == split(live)), float("nan"))
        show(
            f"rank {slow} × {phase:g}" if arguments.network is None else f"network × {phase:g}",
            median(history[:4]),
            "–" if moved_after is None else str(moved_after),
            " ".join(f"{change.seconds:.2f} s" for change in changed) or "–",
            split(live),
            mine,
            f"{split(best)}: {other:.3f}",
            f"{mine / other:.3f}",
            f"{mine / equal:.3f}",
            str(later),
        )
        limit(slow, 1.0)


if __name__ == "__main__":
    main()
