"""Predict the gain from uneven batches on clusters of different GPUs, from times measured on real GPUs.

The clusters have the three forms that Poplar studies: in A devices differ in memory, in B in speed, in C in both. All
methods are compared under the same cost model (`colossal_hetero.planner.batches.allocation`). Nothing is trained here,
and different kinds of GPU were not measured together. The times are those of Sailor (SOSP 2025,
github.com/eth-easl/sailor, MIT, © 2023 ETH Zurich): the layers of models in single precision, with TF32 products where
the GPU has them (``benchmarks/planner/sailor_tables.py`` says why), with sequences of 2,048 tokens, timed one by one.

These assumptions are made. A device may use its nominal memory. Adam takes 16 bytes per parameter: 4 for the parameter,
4 for its gradient, and 8 for two moments. Activations are kept as in Megatron,
without recomputation. Each kind of device has a node of its own. All devices synchronize in a ring with the bandwidth
of the slowest link between nodes. "Best kind alone" is the faster of both kinds without the other, inside its node. If
the ratio to it is below 1, adding the other kind makes training slower.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from colossal_hetero.planner.batches.allocation import Allocation, allocate
from colossal_hetero.planner.batches.batch_profile import (
    BatchProfile,
    DeviceProfile,
    ModelIdentity,
    TimedBatch,
    save_profile,
    state_bytes,
)
from colossal_hetero.planner.batches.time_curve import Curve

DATA = Path(__file__).resolve().parents[2] / "../shared/data/gpu-profiles"


class Card(NamedTuple):
    name: str
    gibibytes: int
    teraflops: float
    """Nominal dense TFLOP/s in TF32, or in fp32 where there is no TF32 (V100, RTX 2080 Ti, Titan RTX).

    From NVIDIA's data sheets of A100, V100 SXM2 and GH200, and appendix A of the white papers on Turing (RTX 2080 Ti,
    Titan RTX) and GA102 (RTX 3090).
    """


CARDS = {
    "A100-40": Card("NVIDIA A100-SXM4-40GB", 40, 156.0),
    "A100-80": Card("NVIDIA A100-SXM4-80GB", 80, 156.0),
    "V100-16": Card("Tesla V100-SXM2-16GB", 16, 15.7),
    "GH-96": Card("NVIDIA GH200 96GB", 96, 494.0),
    "RTX-2080": Card("NVIDIA GeForce RTX 2080 Ti", 11, 13.4),
    "RTX-3090": Card("NVIDIA GeForce RTX 3090", 24, 35.6),
    "Titan-RTX": Card("NVIDIA TITAN RTX", 24, 16.3),
}

CLUSTERS = (
    ("A: memory", "OPT-350", (("A100-80", 4), ("A100-40", 4))),
    ("A: memory", "GPT-Neo-2.7", (("A100-80", 4), ("A100-40", 4))),
    ("B: speed", "OPT-350", (("GH-96", 4), ("A100-80", 4))),
    ("B: speed", "OPT-350", (("RTX-3090", 4), ("Titan-RTX", 4))),
    ("B: speed", "OPT-350", (("V100-16", 2), ("RTX-2080", 2))),
    ("C: both", "OPT-350", (("GH-96", 4), ("V100-16", 4))),
    ("C: both, 4 + 1", "OPT-350", (("GH-96", 4), ("V100-16", 1))),
    ("C: both, 1 + 4", "OPT-350", (("GH-96", 1), ("V100-16", 4))),
)


class Measured:
    """The tables in the folder ``data``."""

    def __init__(self, data: Path) -> None:
        with open(data / "models.json") as file:
            layers = {model["model"]: model["num_all_layers"] for model in json.load(file)}
        seconds: dict[tuple[str, str, int], float] = defaultdict(float)
        count: dict[tuple[str, str, int], int] = defaultdict(int)
        for row in _rows(data / "layer_times.csv"):
            if row["tensor_parallel"] == "1":
                key = row["model"], row["gpu"], int(row["micro_batch"])
                seconds[key] += float(row["forward_seconds"]) + float(row["backward_seconds"])
                count[key] += 1
        self.seconds = {key: value for key, value in seconds.items() if count[key] == layers.get(key[0])}
        """Seconds of forward and backward through all layers, by model, card and micro-batch.

        GPT-Neo-2.7 on GH-96 is left out, because in the table it has the layers and times of OPT-350.
        """
        self.parameters: dict[str, int] = defaultdict(int)
        self.activation_bytes: dict[str, int] = defaultdict(int)
        for row in _rows(data / "layer_memory.csv"):
            if row["tensor_parallel"] == "1":
                self.parameters[row["model"]] += int(float(row["parameter_bytes"])) // 4
                self.activation_bytes[row["model"]] += int(float(row["activation_bytes"]))
        self.links = {(row["gpu"], row["where"], int(row["gpus"])): row for row in _rows(data / "bandwidth.csv")}

    def bytes_per_second(self, card: str, where: str, count: int, size: int) -> float:
        """The bandwidth of ``count`` cards of a node that send messages of ``size`` bytes together."""
        counts = [gpus for own, place, gpus in self.links if (own, place) == (card, where) and gpus <= count]
        row = self.links[card, where, max(counts)]
        x = math.log2(size / 2**20)
        value = (float(row["a"]) * x * x + float(row["b"]) * x + float(row["c"])) * 1e9
        return min(value, float(row["max_bytes_per_second"]))

    def profile(self, model: str, cluster: Sequence[tuple[str, int]]) -> BatchProfile:
        """The profile that profiling at stage 0 would write."""
        ranks = [kind for kind, (_, count) in enumerate(cluster) for _ in range(count)]
        parameters = self.parameters[model]
        identity = ModelIdentity(
            name=model,
            parameters=parameters,
            parameter_bytes=4 * parameters,
            gradient_bytes=4 * parameters,
            optimizer_bytes=8 * parameters,
            digest="",
        )
        state = state_bytes(identity, 0, len(ranks))
        kinds = []
        for card, _ in cluster:
            memory = CARDS[card].gibibytes * 2**30
            points = {batch: time for (own, gpu, batch), time in self.seconds.items() if (own, gpu) == (model, card)}
            kinds.append(
                DeviceProfile(
                    device=CARDS[card].name,
                    memory_bytes=memory,
                    state_bytes=state,
                    sample_bytes=self.activation_bytes[model],
                    max_batch=max((memory - state) // self.activation_bytes[model], 0),
                    memory_bound=True,
                    points=tuple(TimedBatch(batch=batch, seconds=round(points[batch], 6)) for batch in sorted(points)),
                    flops=CARDS[card].teraflops * 1e12,
                    protocols=("nccl", "gloo"),
                )
            )
        size = identity.gradient_bytes
        where = "between nodes" if len(cluster) > 1 else "inside a node"
        alone = len(ranks) == 1
        speed = math.inf if alone else min(self.bytes_per_second(card, where, count, size) for card, count in cluster)
        return BatchProfile(
            stage=0,
            precision="fp32",
            model=identity,
            # In an all-reduce in a ring, each rank sends all but its own part, twice.
            communication_seconds=round(2 * (len(ranks) - 1) / len(ranks) * size / speed, 6),
            kinds=tuple(kinds),
            ranks=tuple(ranks),
        )


def _rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def usable_curves(profile: BatchProfile, stage: int, global_batch: int, extrapolate: bool) -> list[Curve]:
    """The time curves up to the largest micro-batch that fits and, unless ``extrapolate``, that was timed.

    Ranks of one kind share one object.

    Raises:
        ValueError: a device cannot hold one sample.
    """
    curves = profile.curves(stage, global_batch)
    if extrapolate:
        return curves
    own = {
        kind: curve.limited(profile.kinds[kind].measured_batch)
        for kind, curve in zip(profile.ranks, curves, strict=True)
    }
    return [own[kind] for kind in profile.ranks]


def divide(
    profile: BatchProfile, curves: Sequence[Curve], stage: int, accumulation: str, method: str, global_batch: int
) -> Allocation:
    return allocate(
        curves,
        global_batch,
        stage,
        method=method,
        accumulation=accumulation,
        communication_seconds=profile.communication(stage),
        flops=profile.flops,
    )


def merged(rows: Sequence[list[str]]) -> list[list[str]]:
    """Merge rows that differ only in the stage."""
    stages: dict[tuple[str, ...], list[str]] = {}
    for stage, *rest in rows:
        stages.setdefault(tuple(rest), []).append(stage)
    return [[", ".join(own), *rest] for rest, own in stages.items()]


def batches(profile: BatchProfile, allocation: Allocation) -> str:
    """Micro-batch and samples of the ranks of each kind, for example ``5 (172), 3 (84)``."""
    parts = []
    for kind in range(len(profile.kinds)):
        shares = [share for own, share in zip(profile.ranks, allocation.shares, strict=True) if own == kind]
        samples = sorted({share.samples for share in shares})
        sizes = sorted({share.micro_batch for share in shares})
        parts.append(f"{_range(sizes)} ({_range(samples)})")
    return ", ".join(parts)


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the tables (default: %(default)s)")
    parser.add_argument(
        "--global-batch", type=int, default=1024, help="sequences per global batch (default: 1024, 2 million tokens)"
    )
    parser.add_argument(
        "--extrapolate",
        action="store_true",
        help="allow micro-batches above the largest that was timed, if they fit in memory",
    )
    parser.add_argument("--save", type=Path, help="also write the profile of cluster A with OPT-350 to this file")
    arguments = parser.parse_args()
    if not (arguments.data / "layer_times.csv").exists():
        sys.exit(f"no measurements in {arguments.data}; give their folder with --data")
    measured = Measured(arguments.data)

    table = Table(box=MARKDOWN)
    columns = ("cluster", "model", "stage", "accumulation", "micro-batch (samples) of a rank", "samples/s")
    for column in (*columns, "× uniform", "× flops", "× best kind alone"):
        table.add_column(column)
    notes = []
    beyond = False
    for shape, model, cluster in CLUSTERS:
        profile = measured.profile(model, cluster)
        alone = [measured.profile(model, [each]) for each in cluster]
        if arguments.save and (shape, model) == ("A: memory", "OPT-350"):
            save_profile(profile, arguments.save)
        names = f"{shape}: " + " + ".join(f"{count} {card}" for card, count in cluster)
        rows: list[list[str]] = []
        for stage in range(4):
            try:
                curves = usable_curves(profile, stage, arguments.global_batch, arguments.extrapolate)
            except ValueError as error:
                notes.append(f"{names}, {model}: {error}.")
                rows.append([str(stage), "-", "does not fit", "-", "-", "-", "-"])
                continue
            fitting = profile.kind_max_batches(stage, arguments.global_batch)
            if any(batch > kind.measured_batch for batch, kind in zip(fitting, profile.kinds, strict=True)):
                beyond = True
                used = "extrapolated to" if arguments.extrapolate else "not used, although memory holds up to"
                notes.append(f"{names}, {model}, stage {stage}: micro-batches above those timed are {used} {fitting}.")
            for accumulation in ("shared", "per_rank") if stage < 2 else ("shared",):
                made = {
                    method: divide(profile, curves, stage, accumulation, method, arguments.global_batch)
                    for method in ("exact", "uniform", "flops")
                }
                best = 0.0
                for single in alone:
                    with suppress(ValueError):  # the model does not fit on this kind alone
                        own = usable_curves(single, stage, arguments.global_batch, arguments.extrapolate)
                        divided = divide(single, own, stage, accumulation, "exact", arguments.global_batch)
                        best = max(best, divided.samples_per_second)
                speed = made["exact"].samples_per_second
                ratios = [speed / made[method].samples_per_second for method in ("uniform", "flops")]
                rows.append(
                    [
                        str(stage),
                        accumulation if stage < 2 else "each step",
                        batches(profile, made["exact"]),
                        f"{speed:.2f}",
                        *(f"{ratio:.3f}" for ratio in ratios),
                        f"{speed / best:.3f}" if best else "-",
                    ]
                )
        for row in merged(rows):
            table.add_row(names, model, *row)
    console = Console(width=220, highlight=False)
    console.print(f"Predicted throughput with {arguments.global_batch:,} sequences in a global batch\n")
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)
    if not beyond:
        console.print("In every row, memory limits the micro-batch to sizes that were timed.")


if __name__ == "__main__":
    main()
