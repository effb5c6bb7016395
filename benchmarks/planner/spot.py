"""Expected goodput on spot nodes, compared with simulations of random traces.

The clusters have nodes of four A100 and of four V100; the model is OPT-350 with the profile in `examples/plans`. Nodes
are taken away and given back at random moments. The expected goodput is computed from the plans for the numbers of
nodes that may be there; the simulation follows each trace event by event, with the same plans. Without interruptions,
the job would have the goodput of all nodes; "share" is how much of it is expected.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from benchmarks.common import print_table
from colossal_hetero.commands.common import status_line
from colossal_hetero.elastic.replay.assumptions import Assumptions
from colossal_hetero.elastic.replay.elastic_job import simulate_elastic_job
from colossal_hetero.elastic.replay.fitted_plans import FittedPlans, slowest_channel, state_bytes_by_block
from colossal_hetero.elastic.spot.expected_goodput import expected_goodput
from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.cluster.topology import Device, Node, SpotTerms, Topology
from colossal_hetero.planner.prices.node_choice import node_types
from colossal_hetero.planner.profile.layer_profile import load_model_profile
from tests.support.spot_traces import random_trace

HERE = Path(__file__).resolve().parent
CLUSTER, PROFILE = HERE.parent / "elastic/a100-v100.toml", HERE.parents[1] / "examples/plans/opt-350-a100-v100.json"
GLOBAL_BATCH = 256
FOLDER_BYTES_PER_SECOND = 1.2e9
CASES = (
    # nodes of each kind, kinds that are spot, terms
    (2, ("A100-40", "V100-16"), SpotTerms(0.05, 30)),
    (2, ("A100-40", "V100-16"), SpotTerms(0.5, 20)),
    (2, ("A100-40", "V100-16"), SpotTerms(3.0, 10)),
    (2, ("V100-16",), SpotTerms(1.0, 60)),
    (2, ("A100-40",), SpotTerms(1.0, 60)),
    (3, ("A100-40", "V100-16"), SpotTerms(1.0, 15)),
)
EVENTS = 40
"""Of a trace, about."""

COLUMNS = (
    *("nodes of four", "spot", "preemptions / h", "replacement [min]", "trace [h]", "share"),
    *("expected [samples/s]", "simulated [samples/s]", "expected / simulated"),
)


def cluster_of(whole: Topology, nodes: int, spot: tuple[str, ...], terms: SpotTerms) -> Topology:
    """So many nodes of each kind, alike to those of ``whole``."""
    made, devices = list[Node](), list[Device]()
    for kind in ("A100-40", "V100-16"):
        node = next(each for each in whole.nodes if whole.devices[each.devices[0]].kind.name == kind)
        for number in range(nodes):
            ranks = tuple(range(len(devices), len(devices) + len(node.devices)))
            devices += [dataclasses.replace(whole.devices[rank], node=len(made)) for rank in node.devices]
            name = f"{kind}-{number}".lower()
            made.append(
                dataclasses.replace(
                    node, name=name, devices=ranks, spot=terms if kind in spot else None, dollars_per_hour=1.0
                )
            )
    return dataclasses.replace(whole, devices=tuple(devices), nodes=tuple(made))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=1000, help="random traces per row (default: %(default)s)")
    arguments = parser.parse_args()
    whole, profile = load_cluster(CLUSTER), load_model_profile(PROFILE)
    folder_seconds = sum(state_bytes_by_block(profile)) / FOLDER_BYTES_PER_SECOND
    assumptions = Assumptions(load_seconds=folder_seconds, save_seconds=folder_seconds)
    plans: dict[int, FittedPlans] = {}
    rows = []
    for nodes, spot, terms in CASES:
        topology = cluster_of(whole, nodes, spot, terms)
        if nodes not in plans:
            plans[nodes] = FittedPlans(topology, profile, global_batch=GLOBAL_BATCH, link=slowest_channel(topology))
        fit = plans[nodes]
        types = node_types(topology)
        everything = fit(frozenset(range(len(topology.devices))), {})
        assert everything is not None
        with status_line(f"{2 * nodes} nodes, {terms.preemptions_per_hour:g} preemptions per hour"):
            expected = expected_goodput(topology, types, [len(each.nodes) for each in types], fit, assumptions)
            hours = EVENTS / 2 / (nodes * len(spot) * terms.preemptions_per_hour)
            done = sum(
                simulate_elastic_job(
                    random_trace(topology, range(2 * nodes), 3600 * hours, seed), 3600 * hours, fit, assumptions
                ).iterations
                for seed in range(arguments.traces)
            )
        simulated = done / (arguments.traces * hours * 3600)
        ideal = 1.0 / everything.iteration_seconds
        rows.append(
            (
                f"{nodes} × A100, {nodes} × V100",
                " and ".join(kind.partition("-")[0] for kind in spot),
                f"{terms.preemptions_per_hour:g}",
                f"{terms.replacement_minutes:g}",
                f"{hours:.0f}",
                f"{expected.iterations_per_second / ideal:.3f}",
                GLOBAL_BATCH * expected.iterations_per_second,
                GLOBAL_BATCH * simulated,
                f"{expected.iterations_per_second / simulated - 1:+.1%}",
            )
        )
    print_table(
        f"{arguments.traces:,} random traces per row",
        COLUMNS,
        rows,
    )


if __name__ == "__main__":
    main()
