"""Batch profiles of clusters of GPUs, from times that others measured; the clusters of Poplar's Table 1.

python -m benchmarks.papers.gpu_tables FILE.json       (writes the profile of examples/zero/profiles)

The times are those of Sailor (SOSP 2025, github.com/eth-easl/sailor, MIT, © 2023 ETH Zurich): the layers of models in
single precision, with TF32 products where the GPU has them (``benchmarks/planner/sailor_tables.py`` says why), with
sequences of 2,048 tokens, timed one by one. Cards that were not timed have times of a similar one.

Assumptions: a device may use its nominal memory. Adam takes 16 bytes per parameter: 4 for the parameter, 4 for its
gradient, and 8 for two moments. Activations are kept as in Megatron, without recomputation. Each kind of device has a
node of its own. All devices synchronize in a ring with the bandwidth of the slowest link between nodes.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
    """Nominal dense TFLOP/s in TF32, or in fp32 where there is no TF32 (V100, T4).

    From NVIDIA's data sheets of A100, V100 SXM2, V100S and T4, and appendix A of the white paper on Turing.
    """
    like: str = ""
    """The card whose times are taken, in proportion to the nominal speeds; empty: it was timed itself."""


CARDS = {
    "A100-40": Card("NVIDIA A100-SXM4-40GB", 40, 156.0),
    "A100-80": Card("NVIDIA A100-SXM4-80GB", 80, 156.0),
    "A800-80": Card("NVIDIA A800 80GB PCIe", 80, 156.0, like="A100-80"),
    "V100-16": Card("Tesla V100-SXM2-16GB", 16, 15.7),
    "V100S-32": Card("Tesla V100S-PCIE-32GB", 32, 16.4, like="V100-16"),
    "RTX-2080": Card("NVIDIA GeForce RTX 2080 Ti", 11, 13.4),
    "T4": Card("Tesla T4", 16, 8.1, like="RTX-2080"),
}


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
        card = CARDS[card].like or card
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
            timed = CARDS[card].like or card
            slower = CARDS[timed].teraflops / CARDS[card].teraflops
            times = {
                batch: slower * time for (own, gpu, batch), time in self.seconds.items() if (own, gpu) == (model, timed)
            }
            points = dict(sorted(times.items()))
            kinds.append(
                DeviceProfile(
                    device=CARDS[card].name,
                    memory_bytes=memory,
                    state_bytes=state,
                    sample_bytes=self.activation_bytes[model],
                    max_batch=max((memory - state) // self.activation_bytes[model], 0),
                    memory_bound=True,
                    points=tuple(TimedBatch(batch=batch, seconds=round(time, 6)) for batch, time in points.items()),
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


def timed_curves(profile: BatchProfile, stage: int, global_batch: int) -> list[Curve]:
    """The time curves up to the largest micro-batch that fits and was timed. Ranks of one kind share one object.

    Raises:
        ValueError: a device cannot hold one sample.
    """
    kinds = dict(zip(profile.ranks, profile.curves(stage, global_batch), strict=True))
    own = {kind: curve.limited(profile.kinds[kind].measured_batch) for kind, curve in kinds.items()}
    return [own[kind] for kind in profile.ranks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tables", type=Path, default=DATA, help="folder with the tables (default: %(default)s)")
    options = parser.parse_args()
    save_profile(Measured(options.tables).profile("OPT-350", (("A100-80", 4), ("A100-40", 4))), options.file)


if __name__ == "__main__":
    main()
