"""Predicted and measured iteration time of the best plan, whose replicas may differ, and of the best equal one.

sudo python -m benchmarks.pipeline.unequal_replicas [--quotas 1 0.5 0.5] [--memory 1 0.8] [--rounds 5]

Three ranks train a ViT of 6 blocks over Gloo; each is under a CPU quota that the program does not know. The layers are
measured on all ranks at once, then plans for all three are made from these times: of equal replicas only, and of any.
With a ``--memory`` below 1 the slow ranks are planned as if they had this share of the memory that the best plan needs,
so that no slow rank can hold the model alone. The plans are trained in turns. "× equal" compares measured times, and
"predicted" the same of the predictions. The control is the equal plan once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.common import make_vit, print_table, quota_on, read_options, start_ranks, take_turns
from benchmarks.pipeline.trained import Trained, measure_layers, shape
from benchmarks.plans import simple_plan
from colossal_hetero.cli.probe_ranks import probe_ranks
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.simulate import simulate_plan
from colossal_hetero.planner.profile.fitted_profiles import as_profiled
from colossal_hetero.planner.profile.layer_profile import ModelProfile

HIDDEN, BLOCKS, MICRO_BATCH, GLOBAL_BATCH, PERIOD_US = 192, 6, 8, 96, 20_000


def with_less_memory(topology: Topology, quotas: Sequence[float], usable_bytes: float) -> Topology:
    """Slow devices can use so much memory."""
    devices = []
    for device, quota in zip(topology.devices, quotas, strict=True):
        if quota < 1:
            memory = device.kind.memory_reserve_bytes + int(usable_bytes)
            device = dataclasses.replace(device, kind=dataclasses.replace(device.kind, memory_bytes=memory))
        devices.append(device)
    return dataclasses.replace(topology, devices=tuple(devices))


def best_plan(topology: Topology, profile: ModelProfile, unequal: bool) -> Plan:
    wishes = dict(global_batch=GLOBAL_BATCH, micro_batches=[MICRO_BATCH], all_devices=True)
    return simple_plan(topology, profile, **wishes, unequal=unequal)


def main() -> None:
    arguments = read_options(__doc__, quotas=(1.0, 0.5, 0.5), memory=(1.0, 0.8), rounds=5, block=3)
    start_ranks(len(arguments.quotas))
    rows = []
    with quota_on(dist.get_rank(), arguments.quotas[dist.get_rank()], PERIOD_US):
        profile = measure_layers(make_vit(HIDDEN, BLOCKS), MICRO_BATCH)
        measured = as_profiled(probe_ranks(torch.device("cpu"))[0], profile)
        unlimited = best_plan(measured, profile, True)
        largest = max(stage.memory_bytes for replica in unlimited.replicas for stage in replica.stages)
        needed = largest - measured.devices[0].kind.memory_reserve_bytes
        for memory in arguments.memory:
            topology = measured if memory == 1 else with_less_memory(measured, arguments.quotas, memory * needed)
            equal, any_ = (best_plan(topology, profile, unequal) for unequal in (False, True))
            plans = {"equal": equal, "equal, again": equal, "any": any_}
            runs = {name: Trained(plan, make_vit(HIDDEN, BLOCKS)) for name, plan in plans.items()}
            take_turns(list(runs.values()), 0, arguments.rounds, arguments.block)
            for name, run in runs.items():
                took, predicted = run.median_seconds, run.plan.iteration_seconds
                ratios = took / predicted, took / runs["equal"].median_seconds, predicted / equal.iteration_seconds
                shapes = "; ".join(f"{shape(each)} (× {each.micro_batches})" for each in run.plan.replicas)
                rows.append([f"{memory:g}", name, shapes, took, predicted, simulate_plan(run.plan).seconds, *ratios])
    print_table(
        f"CPU quotas {arguments.quotas}; aims: measured ≤ 1.10 of predicted, faster where predicted by 5 %",
        [
            *("memory", "plans", "blocks by replica and rank (× micro-batches)", "measured [s]", "predicted [s]"),
            *("simulated [s]", "measured / predicted", "× equal", "predicted"),
        ],
        rows,
    )


if __name__ == "__main__":
    main()
