"""Predicted and measured iteration time of pipelines that share the network cards of two nodes.

The nodes are network namespaces on this machine, joined by cards of limited bandwidth (token bucket filters). Ranks are
processes that train a ViT over Gloo with Colossal-AI's 1F1B schedule. Two placements are trained:

- *spread*: the first stages are in the one node and the second stages in the other. All activations and gradients of
  activations cross the cards, those of all replicas at the same time; weight gradients stay inside the nodes.
- *inside*: each pipeline is inside a node. Only weight gradients cross the cards, those of both stages at once.

Layers are measured first, by all ranks at the same time, so that they share the processor's cores as in training. The
predictions are those of ``colossal-hetero plan`` and ``simulate``: the formula, and the simulation with blocking
and with overlapped transfers (Gloo sends while the sender computes).

    sudo python -m benchmarks.pipeline.shared_card [--replicas 2 4] [--megabits 10] [--rounds 5]
"""

from __future__ import annotations

import argparse

from benchmarks.common import make_vit, print_table, read_options, take_turns
from benchmarks.pipeline.namespaces import nodes, payload_bytes_per_second, run_in_namespaces
from benchmarks.pipeline.trained import Trained, measure_layers
from benchmarks.plans import price_ranks
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.simulate import simulate_plan
from colossal_hetero.planner.profile.fitted_profiles import as_profiled

HIDDEN, BLOCKS, MICRO_BATCH, MICRO_BATCHES = 192, 4, 8, 4
PATCHES = 64
LOOPBACK_BYTES_PER_SECOND = 1e9
BURST = "16kb"
"""Much less than a message, and enough for the low rates here."""


def machines(replicas: int, megabits: float) -> Topology:
    """Two nodes; each has a device per replica."""
    kind = DeviceKind("cpu", 4 << 30, 1e11)
    inside = Channel("loopback", LOOPBACK_BYTES_PER_SECOND)
    card = (Channel("Ethernet", payload_bytes_per_second(megabits)),)
    return Topology(
        tuple(Device(kind, node, 0) for node in range(2) for _ in range(replicas)),
        tuple(Node(f"node-{n}", 0, tuple(range(n * replicas, (n + 1) * replicas)), inside, card) for n in range(2)),
        ("here",),
    )


def run_rank(replicas: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """By placement, on this rank: measured seconds, and those by the formula and both simulations."""
    profile = measure_layers(make_vit(HIDDEN, BLOCKS), MICRO_BATCH)
    topology = as_profiled(machines(replicas, arguments.megabits), profile)
    placements = {
        "spread": [[[replica], [replicas + replica]] for replica in range(replicas)],
        "inside": [[[2 * replica], [2 * replica + 1]] for replica in range(replicas)],
    }
    found = {}
    for name, ranks in placements.items():
        sizes = {"micro_batch": MICRO_BATCH, "global_batch": MICRO_BATCH * MICRO_BATCHES * replicas}
        run = Trained(price_ranks(topology, profile, ranks, **sizes), make_vit(HIDDEN, BLOCKS))
        take_turns([run], 1, 1, arguments.rounds)
        simulated = [simulate_plan(run.plan, transfers=each).seconds for each in ("blocking", "overlapped")]
        found[name] = [run.median_seconds, run.plan.iteration_seconds, *simulated]
    return found


def main() -> None:
    arguments = read_options(__doc__, replicas=(2, 4), megabits=10.0, rounds=5)
    rows = []
    for replicas in arguments.replicas:
        with nodes([2], 10_000, arguments.megabits, BURST) as made:
            places = [node for node in made for _ in range(replicas)]
            found = run_in_namespaces(places, run_rank, replicas, arguments)[0]
        for placement, (measured, *predicted) in found.items():
            cells = [f"{seconds:.3f} ({seconds / measured - 1:+.1%})" for seconds in predicted]
            rows.append([replicas, placement, f"{measured:.3f}", *cells])
    message = MICRO_BATCH * PATCHES * HIDDEN * 4 / 1e6
    print_table(
        f"{message:.2f} MB per message, {MICRO_BATCHES} micro-batches, cards of {arguments.megabits:g} Mb/s",
        ["replicas", "placement", "measured [s]", "formula [s]", "simulated, blocking [s]", "overlapped [s]"],
        rows,
    )


if __name__ == "__main__":
    main()
