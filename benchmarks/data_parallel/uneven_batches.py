"""Throughput of fitted batches when a CPU quota slows rank 1, relative to the ranks training alone.

sudo python -m benchmarks.data_parallel.uneven_batches [--quotas 0.5 0.25] [--stages 1 3] [--rounds 8]

The program does not know the quota, which slows all work of rank 1, also measuring. The bound is the sum of both ranks'
throughput when each trains alone at the same time, without communication, in the micro-batches of the plugin's
division. Aim: at least 0.95 of this sum. Windows of the variants take turns in the same processes, after an epoch of
warm-up. The model computes much per byte of gradients (a ViT with patch 4 uses each weight for 64 tokens), so that the
result shows the division and not the network.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.common import make_vit, print_table, quota_on, read_options, start_ranks
from benchmarks.data_parallel.turns import Turns, digits, make_optimizer
from colossal_hetero import BatchConfig, HeteroZeroPlugin

METHODS = ("exact", "uniform")
HIDDEN, DEPTH, PATCH, SAMPLES = 256, 4, 4, 256
BLOCK = 2
"""Iterations of a window."""


class Alone:
    """A model that this rank trains alone, without a plugin, in micro-batches of given sizes."""

    def __init__(self, images: Tensor, labels: Tensor, sizes: Sequence[int]) -> None:
        self._model = make_vit(HIDDEN, DEPTH, PATCH)
        self._optimizer = make_optimizer(self._model)
        self._samples = sum(sizes)
        cut = (part[: self._samples].split(list(sizes)) for part in (images, labels))
        self._batches = list(zip(*cut, strict=True))

    def iterate(self) -> None:
        for images, labels in self._batches:
            (cross_entropy(self._model(images), labels) * (len(images) / self._samples)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def samples_per_second(self, iterations: int) -> float:
        """The throughput of this rank, over a window that all ranks begin at the same time."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(iterations):
            self.iterate()
        return iterations * self._samples / (time.perf_counter() - start)


def measure(quota: float, stage: int, rounds: int, folder: Path) -> list[tuple]:
    """Rows of the table for one quota and one stage. The quota must already apply."""
    data = digits()
    variants = [
        Turns(
            method,
            HeteroZeroPlugin(
                stage,
                batches=BatchConfig(global_batch_size=SAMPLES, method=method, profile=folder / f"{quota}-{stage}.json"),
            ),
            make_vit(HIDDEN, DEPTH, PATCH),
            data,
        )
        for method in METHODS
    ]
    for variant in variants:
        # The warm-up is a whole epoch, because the plugin checks speeds at its end. Equal batches need no check.
        for _ in range(variant.epoch_iterations if variant.name == "exact" else 2):
            variant.iterate()
    # Each rank uses the micro-batches that our plugin chose. Larger ones can take longer per sample.
    alone = Alone(*data.tensors, variants[0].plugin.allocation.shares[dist.get_rank()].sizes)
    alone.samples_per_second(2)
    speeds: dict[str, list[float]] = {name: [] for name in (*METHODS, "rank 0 alone", "rank 1 alone")}
    for _ in range(rounds):
        for variant in variants:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(BLOCK):
                variant.iterate()
            speeds[variant.name].append(BLOCK * SAMPLES / (time.perf_counter() - start))
        own_speed = alone.samples_per_second(BLOCK)
        everyone: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(everyone, own_speed)
        for rank, speed in enumerate(everyone):
            speeds[f"rank {rank} alone"].append(speed)
    bound = median(sum(pair) for pair in zip(speeds["rank 0 alone"], speeds["rank 1 alone"], strict=True))
    divisions = {variant.name: variant.division for variant in variants}
    labels = f"{quota:g}", str(stage)
    rows = [
        (*labels, name, median(found), median(found) / bound, min(found), max(found), divisions.get(name, ""))
        for name, found in speeds.items()
    ]
    return [*rows, (*labels, "sum of both alone", bound, 1.0, "", "", "")]


def main() -> None:
    arguments = read_options(__doc__, quotas=(0.5, 0.25), stages=(1, 3), rounds=8)
    start_ranks(2)
    rows = []
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else nullcontext() as name:
        place = [name]
        dist.broadcast_object_list(place)
        for quota in arguments.quotas:
            with quota_on(1, quota):
                for stage in arguments.stages:
                    rows += measure(quota, stage, arguments.rounds, Path(place[0]))
        dist.barrier()
    columns = ("quota", "stage", "variant", "samples/s", "of the sum", "least", "most", "samples by rank")
    title = (
        f"Rank 1 of 2 under a CPU quota: ViT, {HIDDEN} wide, {DEPTH} deep, patch {PATCH}, digits, {SAMPLES} samples "
        "per iteration, AdamW, fp32"
    )
    notes = [
        "`exact` is our plugin. `uniform` is our plugin with equal batches, as Colossal-AI divides. Values are medians "
        "over windows; least and most are single windows."
    ]
    print_table(title, columns, rows, notes)


if __name__ == "__main__":
    main()
