"""Planning time and plan quality by number of GPUs, compared with AutoHet's formulation solved by SCIP. No training.

The clusters are AutoHet's: nodes of eight A100, H800 or H20, with NVLink inside and 400 Gb/s between nodes. The model
is GPT-3 6.7B, with layer times estimated from nominal FLOP/s. SCIP solves Eq. 2 and 3 as they are printed, with a
binary variable per GPU and group.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import print_table
from benchmarks.planner.autohet_groups import MemberKind, effective_power, find_grouping
from colossal_hetero.planner.cluster.gpu_catalog import GPUS
from colossal_hetero.planner.cluster.topology import Channel, Device, Node, Topology
from colossal_hetero.planner.cost.draft import Draft, DraftBuilder
from colossal_hetero.planner.cost.placement import NodeLinks, SlotPool
from colossal_hetero.planner.cost.tp_groups import slot_kinds
from colossal_hetero.planner.profile.layer_profile import LayerSizes, LayerTimes, ModelProfile
from colossal_hetero.planner.solver.problem import Problem
from colossal_hetero.planner.solver.search import search

NAMES = ("A100-80", "H800", "H20")
CLUSTERS = {
    16: (8, 4, 4),
    24: (8, 8, 8),
    32: (16, 8, 8),
    64: (24, 24, 16),
    256: (88, 88, 80),
    1024: (344, 344, 336),
    4096: (1368, 1368, 1360),
}
"""By total number of GPUs: the number of each kind in ``NAMES``."""
NVLINK, ROCE = Channel("NVLink", 300e9, 1e-5), Channel("RoCE", 50e9, 2e-5)
LAYERS, HIDDEN, SEQUENCE, VOCABULARY = 32, 4096, 2048, 50257
"""Sizes of GPT-3 6.7B."""
DEGREES, SIZES = (1, 2, 4, 8), (1, 2, 4, 8)
REACHED = 0.45
"""Share of the nominal FLOP/s that layers reach, for all kinds; tensor parallelism and small micro-batches lower it."""


def cluster(counts: Sequence[int]) -> Topology:
    """A cluster of nodes of up to eight GPUs, with ``counts`` GPUs of the kinds in ``NAMES``."""
    devices: list[Device] = []
    nodes = []
    for name, count in zip(NAMES, counts, strict=True):
        for start in range(0, count, 8):
            first, number = len(devices), min(8, count - start)
            devices += [Device(GPUS[name], len(nodes), 0)] * number
            nodes.append(Node(f"{name}-{start // 8}", 0, tuple(range(first, first + number)), NVLINK, (ROCE,)))
    return Topology(tuple(devices), tuple(nodes), ("cluster",))


def gpt() -> ModelProfile:
    """Profile of GPT-3 6.7B with layer times from FLOP (Holmes, Eq. 6, by layer).

    Mixed precision with Adam takes 16 bytes per parameter.
    """
    block = 24 * SEQUENCE * HIDDEN**2 * (1 + SEQUENCE / (6 * HIDDEN))
    head = 2 * SEQUENCE * HIDDEN * VOCABULARY
    times, sizes = [], []
    for degree in DEGREES:
        for name in NAMES:
            for size in SIZES:
                reached = REACHED * (1 - 0.06 * np.log2(degree)) * (0.85 + 0.05 * np.log2(size))
                flop = np.array([0.01 * block, *[block] * LAYERS, head])
                seconds = flop * size / degree / (GPUS[name].flops * reached)
                times.append(
                    LayerTimes(
                        device=name,
                        tensor_parallel=degree,
                        micro_batch=size,
                        forward_seconds=tuple(seconds),
                        backward_seconds=tuple(2 * seconds),
                        update_seconds=(5e-4 / degree,) * (LAYERS + 2),
                    )
                )
        embedding, parameters = 2 * VOCABULARY * HIDDEN // degree, 24 * HIDDEN**2 // degree
        residual = 2 * SEQUENCE * HIDDEN
        sizes.append(
            LayerSizes(
                tensor_parallel=degree,
                parameter_bytes=(embedding, *[parameters] * LAYERS, embedding),
                activation_bytes=(residual, *[17 * residual // degree] * LAYERS, residual),
                output_bytes=(residual,) * (LAYERS + 2),
            )
        )
    return ModelProfile(name="GPT-3 6.7B", precision="bf16", state_factor=8.0, times=tuple(times), sizes=tuple(sizes))


def kinds_of(counts: Sequence[int]) -> list[MemberKind]:
    return [
        MemberKind(GPUS[name].flops / 1e12, GPUS[name].memory_bytes / 1e9, count)
        for name, count in zip(NAMES, counts, strict=True)
    ]


def model_gigabytes(model: ModelProfile, size: int) -> float:
    costs = model.costs(NAMES[0], 1, size)
    return float(costs.state_bytes.sum() + costs.activation_bytes.sum()) / 1e9


def scip(kinds: Sequence[MemberKind], memory: float, micro_batches: int, limit: float) -> tuple[float, str, float]:
    """Solve Eq. 3 by SCIP. Returns the objective of the groups that it found, its status, and its seconds.

    ``limit`` is SCIP's time limit in seconds.
    """
    try:
        from pyscipopt import Model, quicksum
    except ImportError:
        return np.nan, "pip install colossal-hetero[bench]", np.nan
    power = [kind.power for kind in kinds for _ in range(kind.count)]
    capacity = [kind.memory_bytes for kind in kinds for _ in range(kind.count)]
    gpus = range(len(power))
    start = time.perf_counter()
    model: Any = Model()
    model.hideOutput()
    model.setParam("limits/time", limit)
    large = 2.0 * sum(power)
    x = {(i, j): model.addVar(vtype="B") for i in gpus for j in gpus}
    y = [model.addVar(vtype="B") for _ in gpus]
    z = model.addVar(lb=0.0, ub=large)
    objective = model.addVar(lb=0.0, ub=large)
    model.setObjective(objective, "maximize")
    model.addCons(objective <= quicksum(y) * z)  # (3a)
    for j in gpus:
        stages = quicksum(x[i, j] for i in gpus)
        speed = quicksum(power[i] * x[i, j] for i in gpus)
        model.addCons(quicksum(capacity[i] * x[i, j] for i in gpus) + memory * (1 - y[j]) >= memory)  # (3b)
        # (2) and (3c): G (K + P − 1) = K Σ g x.
        model.addCons(speed * micro_batches + large * micro_batches * (1 - y[j]) >= z * (micro_batches + stages - 1))
        model.addCons(stages <= len(power) * y[j])  # (3d)
        model.addCons(y[j] <= stages)
    for i in gpus:
        model.addCons(quicksum(x[i, j] for j in gpus) == 1)  # (3e)
    model.optimize()
    seconds = time.perf_counter() - start
    if model.getNSols() == 0:
        return np.nan, model.getStatus(), seconds
    solution = model.getBestSol()
    kind_of = [number for number, kind in enumerate(kinds) for _ in range(kind.count)]
    groups = np.zeros((len(power), len(kinds)), dtype=np.int64)
    for i, j in x:
        groups[j, kind_of[i]] += round(solution[x[i, j]])
    groups = groups[groups.sum(axis=1) > 0]
    reached = effective_power(groups, [kind.power for kind in kinds], micro_batches).min()
    return float(len(groups) * reached), model.getStatus(), seconds


def autohet_iteration(topology: Topology, model: ModelProfile, global_batch: int) -> float:
    """Predicted seconds per iteration of AutoHet's Algorithm 1: for each degree the best groups by Eq. 3, then Eq. 4.

    The groups are exact solutions, which SCIP does not always find in its time limit. All micro-batch sizes are tried;
    the best one counts.
    """
    builder, best = DraftBuilder(topology, "autohet"), np.inf
    for degree in DEGREES:
        for size in SIZES:
            kinds = slot_kinds(topology, model, degree, size)
            if not kinds:
                continue
            total = global_batch // size
            costs = kinds[0].costs
            grouping = find_grouping(
                [MemberKind(1 / kind.model_seconds, kind.memory_bytes, len(kind.slots)) for kind in kinds],
                float(costs.state_bytes.sum() + costs.activation_bytes.sum()),
                lambda groups, total=total: max(1.0, total / groups),
                max_members=model.blocks,
                max_groups=total,
            )
            if grouping is None:
                continue
            links = NodeLinks(topology, float(costs.output_bytes.max()))
            draft = builder.build(SlotPool(degree, size, tuple(kinds), total, links), grouping.groups)
            if isinstance(draft, Draft):
                best = min(best, draft.seconds)
    return best


def seconds_of(function: Any, repeats: int) -> tuple[float, Any]:
    """Median seconds of ``repeats`` calls, and the result of the last call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return median(times), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="*",
        default=list(CLUSTERS),
        choices=list(CLUSTERS),
        help="cluster sizes (default: all)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each timing (default: 5)")
    parser.add_argument("--global-batch", type=int, default=512, help="samples per iteration (default: 512)")
    parser.add_argument(
        "--micro-batches", type=int, default=64, help="micro-batches per iteration, K of Eq. 2 (default: 64)"
    )
    parser.add_argument(
        "--scip-seconds", type=float, default=60.0, help="SCIP's time limit; 0: do not run it (default: 60)"
    )
    parser.add_argument("--scip-gpus", type=int, default=64, help="run SCIP up to this number of GPUs (default: 64)")
    arguments = parser.parse_args()
    model = gpt()
    plans, groupings = [], []
    for gpus in arguments.gpus:
        topology = cluster(CLUSTERS[gpus])
        whole = Problem(topology=topology, profile=model, global_batch=arguments.global_batch)
        cells: list[object] = []
        for unequal in (True, False):
            problem = replace(whole, unequal=unequal)
            seconds, found = seconds_of(lambda problem=problem: search(problem), arguments.repeats)
            cells += [seconds, found.best.iteration_seconds]
        uniform = search(replace(whole, method="uniform", unequal=False, recompute=False, zero_stages=(0,))).best
        autohet_seconds = autohet_iteration(topology, model, arguments.global_batch)
        plans.append((f"{gpus:,}", *cells, uniform.iteration_seconds, autohet_seconds))

        kinds, memory = kinds_of(CLUSTERS[gpus]), model_gigabytes(model, 1)
        seconds, grouping = seconds_of(
            lambda kinds=kinds, memory=memory: find_grouping(kinds, memory, arguments.micro_batches), arguments.repeats
        )
        scip_result: tuple[float, str, float] = (np.nan, "not run", np.nan)
        if arguments.scip_seconds > 0 and gpus <= arguments.scip_gpus:
            # In its own process, because SCIP sometimes aborts on the larger problems.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                future = process.submit(scip, kinds, memory, arguments.micro_batches, arguments.scip_seconds)
                try:
                    scip_result = future.result()
                except BrokenProcessPool:
                    scip_result = (np.nan, "aborted", np.nan)
        groupings.append((f"{gpus:,}", len(grouping.groups), seconds, grouping.objective, *scip_result))
    print_table(
        f"Whole plans, GPT-3 6.7B, global batch {arguments.global_batch}: planning time and predicted iteration time",
        (
            "GPUs",
            "planning [s]",
            "iteration [s]",
            "planning, equal [s]",
            "iteration, equal [s]",
            "iteration, uniform [s]",
            "iteration, AutoHet [s]",
        ),
        plans,
        (
            '"equal": all pipelines are divided in the same way; "uniform": equal, with the same number of layers '
            'per stage; "AutoHet": Algorithm 1 with exact groups, micro-batches by speed.',
        ),
    )
    print_table(
        f"\nEq. 3 alone, K = {arguments.micro_batches}, one GPU per stage",
        (
            "GPUs",
            "groups",
            "time [s]",
            "objective [TFLOP/s]",
            "SCIP: objective [TFLOP/s]",
            "SCIP: status",
            "SCIP: time [s]",
        ),
        groupings,
        ("AutoHet's published planning times: 1.23, 5.72, 16.96 and 159 s for 16, 24, 32 and 64 GPUs.",),
    )


if __name__ == "__main__":
    main()
