"""Predict how much plans for clusters of two or three kinds of GPU gain, from times measured on real GPUs.

A cluster has two nodes of four GPUs of each kind, or one node of eight for RTX and Titan cards, in one network. Nodes
of different kinds communicate at the bandwidth of the slower one. "Planned" is the planner's best plan. "Uniform" is
the best plan that uses all devices and gives all pipelines the same number of micro-batches and all stages the same
number of blocks, with ranks as launched. "Alone" is the planner's best plan for the nodes of one kind, without the
others. A plan for all kinds may leave devices out, so it should never be slower than any of these; the last line says
whether it is. One cost model predicts all of them; no two kinds were run together. `benchmarks.planner.measured_plans`
compares the model with iterations that were run. A plan may use the nominal memory of a device. --save writes the
profile that examples/plans has to a file, and does nothing else. `benchmarks.papers.poplar` is about dividing batches
instead of layers.

Times and bandwidths were measured by the authors of Sailor (SOSP 2025, github.com/eth-easl/sailor, MIT, © 2023 ETH
Zurich), in single precision with TF32 matrix products. Those of GPT-Neo-2.7 on GH200 are estimated.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import print_markdown, read_options
from benchmarks.planner.published_clusters import DATA, MICRO_BATCHES, read_published
from benchmarks.planner.sailor_tables import GpuChannels, make_topology, profile_part
from benchmarks.plans import price_ranks, simple_plan
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.profile.layer_profile import ModelProfile, save_profile

NODES = {"RTX-3090": (1, 8), "RTX-2080": (1, 8), "Titan-RTX": (1, 8)}
"""Number of nodes, and GPUs per node; other kinds have two nodes of four. Sailor had one node of each RTX and Titan."""
CLUSTERS = (("A100-40", "V100-16"), ("GH-96", "A100-80"), ("RTX-3090", "RTX-2080", "Titan-RTX"))
GLOBAL_BATCH = 256
SHIPPED = (("A100-40", "V100-16"), (1, 2, 4), 8)
"""Devices, tensor-parallel degrees and largest micro-batch of the OPT-350 profile in ``examples/plans``."""

Kinds = Sequence[str]


def topology_of(channels: dict[str, GpuChannels], kinds: Kinds) -> Topology:
    return make_topology(channels, [(kind, *NODES.get(kind, (2, 4))) for kind in kinds])


def planned_for(topology: Topology, profile: ModelProfile) -> Plan | str:
    """The planner's best plan, or the reason why there is none."""
    try:
        return simple_plan(topology, profile, global_batch=GLOBAL_BATCH, micro_batches=MICRO_BATCHES)
    except ValueError as error:
        return str(error)


def uniform_for(topology: Topology, profile: ModelProfile) -> Plan | str:
    """The best plan without a planner, which uses all devices and makes all pipelines and all stages equal.

    All degrees and micro-batch sizes are tried, with ranks as launched: pipeline by pipeline, and stage by stage.
    Returns the reason if there is no such plan.
    """
    best, reason = None, "no division into equal parts"
    count = len(topology.devices)
    for degree, micro_batch in itertools.product((1, 2, 4, 8), MICRO_BATCHES):
        for replicas in range(1, count // degree + 1):
            stages, left = divmod(count // degree, replicas)
            if left or stages > profile.blocks:
                continue
            grid = np.arange(count)
            by_pipeline = grid.reshape(replicas, stages, degree)
            by_stage = grid.reshape(stages, replicas, degree).transpose(1, 0, 2)
            for ranks in (by_pipeline, by_stage):
                try:
                    plan = price_ranks(
                        topology, profile, ranks.tolist(), micro_batch=micro_batch, global_batch=GLOBAL_BATCH
                    )
                except ValueError as error:  # not timed, not divisible, or too large
                    reason = str(error)
                    continue
                fits = all(
                    stage.memory_bytes <= stage.memory_available_bytes
                    for replica in plan.replicas
                    for stage in replica.stages
                )
                if fits and (best is None or plan.iteration_seconds < best.iteration_seconds):
                    best = plan
    return best or reason


def shape(plan: Plan) -> str:
    """The plan in words: how many pipelines of each kind, and the blocks and devices of their stages."""
    shapes: dict[str, int] = {}
    for replica in plan.replicas:
        stages = " + ".join(f"{stage.blocks[1] - stage.blocks[0]} {stage.device}" for stage in replica.stages)
        key = f"({stages}) × {replica.micro_batches}"
        shapes[key] = shapes.get(key, 0) + 1
    parts = [f"{count} of {key}" for key, count in shapes.items()]
    return f"TP {plan.tensor_parallel}, micro-batch {plan.micro_batch}: " + ", ".join(parts)


def seconds(found: Plan | str) -> str:
    return f"{found.iteration_seconds:.2f}" if isinstance(found, Plan) else "-"


def ratio(found: Plan | str, plan: Plan) -> str:
    return f"{found.iteration_seconds / plan.iteration_seconds:.2f}" if isinstance(found, Plan) else "-"


def main() -> None:
    arguments = read_options(__doc__, data=DATA, save=Path)
    profiles, channels, _ = read_published(arguments.data)
    if arguments.save:
        save_profile(profile_part(profiles[0], *SHIPPED), arguments.save)
        return
    rows = []
    notes, slower = [], []
    for kinds in CLUSTERS:
        for profile in profiles:
            if not set(kinds) <= set(profile.devices):
                continue
            where = f"{' + '.join(kinds)}, {profile.name}"
            start = time.perf_counter()
            topology = topology_of(channels, kinds)
            planned = planned_for(topology, profile)
            took = time.perf_counter() - start
            uniform = uniform_for(topology, profile)
            alone = {kind: planned_for(topology_of(channels, [kind]), profile) for kind in kinds}
            found = {"planned": planned, "uniform": uniform, **{f"{kind} alone": plan for kind, plan in alone.items()}}
            notes += [f"{where}, {name}: {plan}" for name, plan in found.items() if isinstance(plan, str)]
            others = {name: plan for name, plan in found.items() if isinstance(plan, Plan) and name != "planned"}
            if not isinstance(planned, Plan):
                slower += [f"{where}: {name} has a plan, but the whole cluster has none" for name in others]
                continue
            slower += [
                f"{where}: {name} takes {plan.iteration_seconds:.3f} s, planned {planned.iteration_seconds:.3f}"
                for name, plan in others.items()
                if plan.iteration_seconds < planned.iteration_seconds * (1 - 1e-9)
            ]
            quickest = min(
                (plan for plan in alone.values() if isinstance(plan, Plan)),
                key=lambda plan: plan.iteration_seconds,
                default="",
            )
            row = (
                " + ".join("{} × {} {}".format(*NODES.get(kind, (2, 4)), kind) for kind in kinds),
                profile.name,
                seconds(planned),
                seconds(uniform),
                ", ".join(seconds(plan) for plan in alone.values()),
                ratio(uniform, planned),
                ratio(quickest, planned),
                f"{planned.world_size} of {len(topology.devices)}",
                shape(planned),
                f"{took:.1f}",
            )
            rows.append(row)
    columns = ["cluster", "model", "planned [s]", "uniform [s]", "alone [s]", "uniform / planned"]
    columns += ["best alone / planned", "devices used", "plan", "planning took [s]"]
    print_markdown(f"Predicted seconds per iteration, {GLOBAL_BATCH:,} sequences of 2,048 tokens", columns, rows)
    for note in notes:
        print(note)
    for each in slower:
        print(f"SLOWER: {each}")
    print("Planned is never slower than the others." if not slower else f"Planned is slower in {len(slower)} cases.")
    sys.exit(bool(slower))


if __name__ == "__main__":
    main()
