"""What plans take if a message that crosses a network card alone gets what one GPU was measured to send.

The published bandwidths between nodes were measured for 1, 2 and 4 (or 8) GPUs of a node that send at the same time.
The planner gives a node the bandwidth of all its GPUs together, and a message that is alone gets all of it: 5.8 GB/s on
V100-16, where a single GPU was measured to send 1.7 GB/s. Here each node has several network cards instead. The first
has the bandwidth of one sending GPU, which no message can exceed, and all together have that of all GPUs. If one GPU
alone already fills the card, as on the RTX nodes, nothing changes.

Columns: the planner's default plan as it is priced now; the same layout priced with the limit; the default plan that is
found with the limit, and how much slower the first one is. With ``--sailor``, Sailor's simulator prices both. With
``--plans``, the fastest plan of a peer is priced with the limit, too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.planner.peers import PeerPlan, load_peer_plans, print_markdown
from benchmarks.planner.published_clusters import DATA, MICRO_BATCHES, published_cases, read_published
from benchmarks.planner.sailor_peers.inputs import prepare_copy
from benchmarks.planner.sailor_simulator import SailorSimulator, load_sailor
from colossal_hetero.planner.cluster.topology import Channel, Topology
from colossal_hetero.planner.evaluation.evaluate import evaluate_layout
from colossal_hetero.planner.layout_line.plan_layout import layout_of
from colossal_hetero.planner.layout_line.read_layout import read_layout
from colossal_hetero.planner.layout_line.write_layout import write_layout
from colossal_hetero.planner.plans.plan import Plan
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.published.sailor_tables import GpuChannels
from colossal_hetero.planner.search.make_plans import make_plans

FILLED = 1.05
"""A GPU fills the network card of its node if all GPUs together send at most this much faster."""


def limited(topology: Topology, channels: Mapping[str, GpuChannels]) -> Topology:
    """The topology in which no message between nodes is faster than what one GPU was measured to send."""
    nodes = []
    for node in topology.nodes:
        (all_gpus,), others = node.nics, len(node.devices) - 1
        one = channels[topology.devices[node.devices[0]].kind.name].between[1]
        nics: tuple[Channel, ...] = (all_gpus,)
        if all_gpus.bytes_per_second > FILLED * one.bytes_per_second and one.curve and all_gpus.curve:
            a, b, c = ((total - each) / others for total, each in zip(all_gpus.curve, one.curve, strict=True))
            left = (all_gpus.bytes_per_second - one.bytes_per_second) / others
            nics = (one, *(replace(all_gpus, bytes_per_second=left, curve=(a, b, c)),) * others)
        nodes.append(replace(node, nics=nics))
    return replace(topology, nodes=tuple(nodes))


def default_plan(topology: Topology, profile: ModelProfile, global_batch: int) -> Plan:
    return make_plans(topology, profile, global_batch=global_batch, micro_batches=MICRO_BATCHES, keep=1)[0].plan


def sailor_seconds(sailor: SailorSimulator | str, topology: Topology, plan: Plan) -> float | None:
    price = sailor.price(topology, plan) if isinstance(sailor, SailorSimulator) else sailor
    return None if isinstance(price, str) else price.seconds


def best_peer(machines: Topology, profile: ModelProfile, plans: Sequence[PeerPlan], global_batch: int) -> str:
    """Seconds of the fastest plan of a peer that fits, and whose it is."""
    found = []
    for each in plans:
        try:
            priced = evaluate_layout(machines, profile, read_layout(each.layout), global_batch=global_batch)
        except ValueError:
            continue
        if priced.fits:
            found.append((priced.plan.iteration_seconds, each.peer.split(" (")[0]))
    return "{:.3f} ({})".format(*min(found)) if found else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the tables (default: %(default)s)")
    parser.add_argument("--sailor", type=Path, help="checkout of Sailor's repository, for its simulator")
    parser.add_argument("--global-batch", type=int, default=256, help="sequences per iteration (default: %(default)s)")
    parser.add_argument("--plans", type=Path, help="folder with plans of peers (TOML)")
    arguments = parser.parse_args()
    peers = load_peer_plans(arguments.plans) if arguments.plans else []
    published = read_published(arguments.data)
    rows, slower, better = [], 0, [0, 0]
    with tempfile.TemporaryDirectory() as folder:
        copy = None
        if arguments.sailor:
            copy = prepare_copy(arguments.sailor, Path(folder), published.profiles, published.channels, MICRO_BATCHES)
        for cluster, topology, profile in published_cases(arguments.data):
            sailor = load_sailor(copy, profile)
            limit = limited(topology, published.channels)

            now, then = (default_plan(each, profile, arguments.global_batch) for each in (topology, limit))
            lines = [write_layout(layout_of(each)) for each in (now, then)]
            again = evaluate_layout(limit, profile, read_layout(lines[0]), global_batch=arguments.global_batch).plan
            ratio = again.iteration_seconds / then.iteration_seconds
            slower += ratio > 1.01
            own = [each for each in peers if (each.cluster, each.model) == (cluster, profile.name)]
            peer = best_peer(limit, profile, own, arguments.global_batch)
            prices = [sailor_seconds(sailor, topology, each) for each in (now, then)]
            if None not in prices and lines[0] != lines[1]:
                better[prices[1] < prices[0]] += 1  # type: ignore[operator]
            times = [f"{each.iteration_seconds:.3f}" for each in (now, again, then)]
            said = ["-" if each is None else f"{each:.3f}" for each in prices]
            rows.append([cluster, profile.name, *times, f"{ratio:.3f}", peer, *said])
            rows[-1].append(lines[1] if lines[1] != lines[0] else "the same")
    names = [
        "cluster",
        "model",
        "now [s]",
        "with limit [s]",
        "best with limit [s]",
        "ratio",
        "best peer with limit [s]",
    ]
    names += ["Sailor: now [s]", "Sailor: best with limit [s]", "best with limit"]
    print_markdown("Default plans if a lone message gets what one GPU was measured to send", names, rows)
    print(f"More than 1 % slower than the best with the limit: {slower} of {len(rows)}.")
    print(f"Of {sum(better)} other plans, Sailor's simulator finds {better[1]} faster than the plan now.")


if __name__ == "__main__":
    main()
