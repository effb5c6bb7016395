"""Whether the planner's simple plans fit in memory, counted independently, on eleven clusters.

Simple plans have no recomputation and ZeRO stage 0. Memory is counted from the published table of layers as Sailor
counts it: 24 bytes of state per parameter, the kept activations of ``min(K, S − s)`` micro-batches in stage s of S, and
3 GB for context, libraries and buffers. A plan without a pipeline has 4 bytes per parameter more, for the buckets of
DistributedDataParallel. A plan exceeds memory if a stage needs more than its GPU has. As a control, plans are also made
as before this was modeled: 16 bytes per parameter, no reserve, and nothing for what passes need for a moment.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

from benchmarks.common import print_table, read_options
from benchmarks.planner.published_clusters import DATA, MICRO_BATCHES, published_cases
from benchmarks.plans import simple_plan
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.profile.layer_profile import ModelProfile

GLOBAL_BATCH = 256
STATE_BYTES, BUCKET_BYTES, OTHER_BYTES = 24, 4, 3e9

LayerBytes = dict[tuple[str, int], list[tuple[float, float]]]
"""Bytes of fp32 parameters and of kept activations of each layer, by model and tensor-parallel degree."""


def layer_bytes(path: Path) -> LayerBytes:
    found: LayerBytes = defaultdict(list)
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            sizes = float(row["parameter_bytes"]), float(row["activation_bytes"])
            found[row["model"], int(row["tensor_parallel"])].append(sizes)
    return found


def excess_bytes(plan: Plan, profile: ModelProfile, layers: LayerBytes) -> float:
    """Bytes by which the fullest device of a plan exceeds its memory; negative if all fit."""
    rows = layers[profile.name, plan.tensor_parallel]
    excess = []
    for replica in plan.replicas:
        for number, stage in enumerate(replica.stages):
            first = 0 if number == 0 else stage.blocks[0] + profile.before
            last = len(rows) if number == len(replica.stages) - 1 else stage.blocks[1] + profile.before
            in_flight = min(replica.micro_batches, len(replica.stages) - number)
            per_parameter = STATE_BYTES + (BUCKET_BYTES if len(replica.stages) == 1 else 0)
            held = sum(
                per_parameter / 4 * parameters + in_flight * plan.micro_batch * activations
                for parameters, activations in rows[first:last]
            )
            excess.append(held + OTHER_BYTES - stage.memory_available_bytes)
    return max(excess)


def best_plan(topology: Topology, profile: ModelProfile) -> Plan | str:
    try:
        return simple_plan(topology, profile, global_batch=GLOBAL_BATCH, micro_batches=MICRO_BATCHES)
    except ValueError as error:
        return str(error)


def as_before(profile: ModelProfile) -> ModelProfile:
    """The profile without what the planner did not count."""
    sizes = tuple(each.model_copy(update={"temporary_bytes": (0,) * profile.layers}) for each in profile.sizes)
    return profile.model_copy(update={"state_factor": 4.0, "sizes": sizes})


def main() -> None:
    arguments = read_options(__doc__, data=DATA)
    cases = published_cases(arguments.data)
    layers = layer_bytes(arguments.data / "layer_memory.csv")
    rows, exceeding = [], [0, 0]
    for cluster, topology, profile in cases:
        cells = []
        for which, (machines, model) in enumerate(
            ((topology.with_memory_reserve(0), as_before(profile)), (topology, profile))
        ):
            plan = best_plan(machines, model)
            if isinstance(plan, str):
                cells += ["no plan", "-"]
                continue
            excess = excess_bytes(plan, model, layers)
            exceeding[which] += excess > 0
            cells += [f"{plan.iteration_seconds:.2f}", f"{excess / 1e9:+.1f}"]
        rows.append([cluster, profile.name, *cells])
    print_table(
        f"Simple plans for {GLOBAL_BATCH} sequences: predicted seconds, and GB above the memory of a GPU",
        ["cluster", "model", "before [s]", "above [GB]", "now [s]", "above [GB]"],
        rows,
    )
    print(f"Plans that exceed memory: {exceeding[0]} before, {exceeding[1]} now, of {len(rows)}.")


if __name__ == "__main__":
    main()
