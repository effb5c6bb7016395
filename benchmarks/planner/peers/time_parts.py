"""The parts of the time of simple plans: passes, transfers between stages and sums of gradients, in two models.

Each cell is "transfers + sums" in seconds of an iteration. "Simple" is the search space without recomputation and ZeRO,
which Sailor's simulator does not know. "Ours" is the formula. "Slow inside" gives links inside a node the bandwidth
of one GPU between nodes, as Sailor's simulator does. Devices are chosen again for each column.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.common import print_markdown
from benchmarks.planner.peers.inputs import prepare_copy
from benchmarks.planner.peers.simulator import SailorSimulator, load_sailor
from benchmarks.planner.published_clusters import DATA, MICRO_BATCHES, published_cases, read_published
from benchmarks.plans import simple_plan
from colossal_hetero.planner.cluster.topology import Channel, Topology
from colossal_hetero.planner.cost.evaluate import evaluate_layout
from colossal_hetero.planner.cost.layout_line import PlanLayout, layout_of, read_layout, write_layout
from colossal_hetero.planner.profile.layer_profile import ModelProfile

NO_TIME = 1e18
"""Bytes per second of links without which only passes and updates are left."""


def without_communication(topology: Topology) -> Topology:
    def fast(channel: Channel) -> Channel:
        return replace(channel, bytes_per_second=NO_TIME, curve=None)

    nodes = [replace(each, inside=fast(each.inside), nics=tuple(map(fast, each.nics))) for each in topology.nodes]
    return replace(topology, nodes=tuple(nodes))


def slow_inside(topology: Topology) -> Topology:
    """Links inside nodes have the bandwidth of the first network card."""
    nodes = [replace(each, inside=replace(each.nics[0], kind=each.inside.kind)) for each in topology.nodes]
    return replace(topology, nodes=tuple(nodes))


def parts(topology: Topology, profile: ModelProfile, layout: PlanLayout, global_batch: int) -> tuple[float, float]:
    """Seconds of the slowest pipeline, and of the sums of gradients."""
    plan = evaluate_layout(topology, profile, layout, global_batch=global_batch).plan
    return max(replica.pipeline_seconds for replica in plan.replicas), plan.synchronization_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the tables (default: %(default)s)")
    parser.add_argument("--sailor", type=Path, help="checkout of Sailor's repository, for its simulator")
    parser.add_argument("--global-batch", type=int, default=256, help="sequences per iteration (default: %(default)s)")
    arguments = parser.parse_args()
    published = read_published(arguments.data)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copy = None
        if arguments.sailor:
            copy = prepare_copy(arguments.sailor, Path(folder), published.profiles, published.channels, MICRO_BATCHES)
        for cluster, topology, profile in published_cases(arguments.data):
            batch = {"global_batch": arguments.global_batch, "micro_batches": MICRO_BATCHES}
            plan = simple_plan(topology, profile, **batch)
            layout = read_layout(write_layout(layout_of(plan)))
            passes, _ = parts(without_communication(topology), profile, layout, arguments.global_batch)
            cells = []
            for machines in (topology, slow_inside(topology)):
                pipeline, sums = parts(machines, profile, layout, arguments.global_batch)
                cells.append(f"{pipeline - passes:.2f} + {sums:.2f}")
            sailor = load_sailor(copy, profile)
            told = sailor.price(topology, plan) if isinstance(sailor, SailorSimulator) else sailor
            cells += ["-", "-"]
            if not isinstance(told, str):
                rest = told.seconds - told.transfer_seconds - told.sum_seconds
                cells[-2:] = [f"{told.transfer_seconds:.2f} + {told.sum_seconds:.2f}", f"{rest:.2f}"]
            rows.append([cluster, profile.name, f"{passes:.2f}", cells[-1], *cells[:-1]])
    names = ["cluster", "model", "passes: ours", "Sailor", "ours", "slow inside", "Sailor"]
    print_markdown("Transfers + sums of gradients of simple plans, in seconds", names, rows)


if __name__ == "__main__":
    main()
