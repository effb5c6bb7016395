"""Plans beside those of an earlier planner, by the same price, and how long planning takes. No training.

``frozen_prices.json`` has the seconds of an iteration that commit 397a7cf planned: on the eleven clusters of
``published_clusters`` (that part needs their tables), on 90 random clusters of up to 16 devices, and on 64 to 4,096
GPUs of three kinds, with a model that fits easily and with one that fits tightly.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import print_markdown, read_options
from benchmarks.planner.autohet_clusters import CLUSTERS, cluster, gpt
from benchmarks.planner.published_clusters import DATA, MICRO_BATCHES, published_cases
from colossal_hetero.planner.cluster.gpu_catalog import GPUS
from colossal_hetero.planner.cluster.topology import Channel, Device, Node, Topology
from colossal_hetero.planner.profile.estimate import Transformer, estimated_profile
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.solver.problem import Problem
from colossal_hetero.planner.solver.search import search
from tests.support.random_clusters import large_problem, like_nodes_problem

FROZEN = Path(__file__).parent / "frozen_prices.json"
GROUPS = ("pub", "rand", "like", "gpt", "tight")
TITLES = {
    "pub": "eleven clusters of measured GPUs",
    "rand": "random clusters of up to 16 devices",
    "like": "random clusters of like nodes",
    "gpt": "64 to 4,096 GPUs, GPT-3 6.7B",
    "tight": "64 to 1,024 GPUs, a model that fits tightly",
}


class Case(NamedTuple):
    name: str
    topology: Topology
    profile: ModelProfile
    global_batch: int
    wishes: dict[str, Any]


def cases(group: str, data: Path) -> Iterator[Case]:
    if group == "pub":
        for name, topology, profile in published_cases(data):
            yield Case(f"pub {name} {profile.name}", topology, profile, 256, {"micro_batches": MICRO_BATCHES})
    elif group in ("rand", "like"):
        make, number = (large_problem, 60) if group == "rand" else (like_nodes_problem, 30)
        for seed in range(number):
            yield Case(f"{group} {seed}", *make(seed), {})
    elif group == "gpt":
        for gpus in (64, 256, 1024, 4096):
            yield Case(f"gpt {gpus}", cluster(CLUSTERS[gpus]), gpt(), 512, {})
    else:
        names = ("A100-80", "V100-32", "H20")
        model = Transformer(layers=48, hidden=6144, heads=48, vocabulary=50304, sequence=2048)
        kinds = [GPUS[name] for name in names]
        profile = estimated_profile(model, kinds, micro_batches=(1, 2, 4), tensor_parallel=(1, 2, 4, 8))
        for gpus in (64, 256, 1024):
            yield Case(f"tight {gpus}", _three_kinds(names, (gpus // 2, gpus // 4, gpus // 4)), profile, 512, {})


def _three_kinds(names: tuple[str, ...], counts: tuple[int, ...]) -> Topology:
    devices: list[Device] = []
    nodes = []
    inside, between = Channel("NVLink", 300e9, 1e-5), Channel("RoCE", 50e9, 2e-5)
    for name, count in zip(names, counts, strict=True):
        for start in range(0, count, 8):
            first = len(devices)
            devices += [Device(GPUS[name], len(nodes), 0)] * 8
            nodes.append(Node(f"{name}-{start // 8}", 0, tuple(range(first, first + 8)), inside, (between,)))
    return Topology(tuple(devices), tuple(nodes), ("cluster",))


def main() -> None:
    arguments = read_options(__doc__, groups=tuple(GROUPS), data=DATA)
    frozen: dict[str, float] = json.loads(FROZEN.read_text())
    rows, timed = [], []
    for group in arguments.groups:
        ratios, seconds = [], []
        for case in cases(group, arguments.data):
            problem = Problem(
                topology=case.topology, profile=case.profile, global_batch=case.global_batch, **case.wishes
            )
            start = time.process_time()
            try:
                found = search(problem, keep=1).best.iteration_seconds
            except ValueError:
                found = np.nan
            seconds.append(time.process_time() - start)
            print(case.name, f"{found:.4g} s, planned in {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
            if case.name in frozen:
                ratios.append(found / frozen[case.name])
            if group in ("gpt", "tight"):
                timed.append([case.name, f"{seconds[-1]:.1f}", f"{found:.4g}", f"{ratios[-1]:.4f}"])
        rows.append(
            [
                TITLES[group],
                str(len(ratios)),
                f"{np.mean(ratios):.4f}",
                f"{np.max(ratios):.4f}",
                str(sum(ratio > 1.005 for ratio in ratios)),
                f"{np.median(seconds):.2f}",
                f"{np.max(seconds):.2f}",
            ]
        )
    columns = ["clusters", "cases", "mean", "worst", "slower by more than 0.5 %", "planning, median [s]", "longest [s]"]
    print_markdown("Seconds of an iteration relative to the frozen prices; planning in CPU seconds", columns, rows)
    if timed:
        print_markdown("Large clusters", ["case", "planning [s]", "iteration [s]", "relative"], timed)


if __name__ == "__main__":
    main()
