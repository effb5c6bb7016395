"""Throughput of fitted batches when a CPU quota slows rank 1, relative to the ranks training alone.

sudo python -m benchmarks.data_parallel.uneven_batches [--quotas 0.5 0.25] [--stages 1 3] [--rounds 8]

Needs Linux, and write access to cgroups (version 1 or 2). The program does not know the quota, which slows all work of
rank 1, also measuring. The bound is the sum of both ranks' throughput when each trains alone at the same time, without
communication, in the micro-batches of the plugin's division. Aim: at least 0.95 of this sum. Windows of the variants
take turns in the same processes, after an epoch of warm-up. The model computes much per byte of gradients (a ViT with
patch 4 uses each weight for 64 tokens), so that the result shows the division and not the network. With a smaller
--batch, the time of synchronization and optimizer steps has a larger effect.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.common import print_table, start_ranks
from benchmarks.tensor_parallel.uneven import Turns, digits, make_model, make_optimizer
from colossal_hetero import BatchConfig, HeteroZeroPlugin
from colossal_hetero.testing.stragglers import cpu_quota

METHODS = ("exact", "uniform")


class Alone:
    """A model that this rank trains alone, without a plugin, in micro-batches of given sizes."""

    def __init__(self, shape: tuple[int, int, int], images: Tensor, labels: Tensor, sizes: Sequence[int]) -> None:
        self._model = make_model(*shape)
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


def measure(quota: float, stage: int, arguments: argparse.Namespace, folder: Path) -> list[tuple]:
    """Rows of the table for one quota and one stage. The quota must already apply."""
    shape = (arguments.hidden, arguments.depth, arguments.patch)
    batch, data = arguments.batch, digits()
    variants = [
        Turns(
            method,
            HeteroZeroPlugin(
                stage,
                batches=BatchConfig(global_batch_size=batch, method=method, profile=folder / f"{quota}-{stage}.json"),
            ),
            make_model(*shape),
            data,
            None,
        )
        for method in METHODS
    ]
    for variant in variants:
        # The warm-up is a whole epoch, because the plugin checks speeds at its end. Equal batches need no check.
        for _ in range(variant.epoch_iterations if variant.name == "exact" else 2):
            variant.iterate()
    # Each rank uses the micro-batches that our plugin chose. Larger ones can take longer per sample.
    alone = Alone(shape, *data.tensors, variants[0].plugin.allocation.shares[dist.get_rank()].sizes)
    alone.samples_per_second(2)
    speeds: dict[str, list[float]] = {name: [] for name in (*METHODS, "rank 0 alone", "rank 1 alone")}
    for _ in range(arguments.rounds):
        for variant in variants:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(arguments.block):
                variant.iterate()
            speeds[variant.name].append(arguments.block * batch / (time.perf_counter() - start))
        own_speed = alone.samples_per_second(arguments.block)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quotas", type=float, nargs="+", default=[0.5, 0.25], help="share of a core that rank 1 gets")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[1, 3], help="stages of ZeRO")
    parser.add_argument("--rounds", type=int, default=8, help="windows of each variant")
    parser.add_argument("--block", type=int, default=2, help="iterations per window")
    parser.add_argument("--batch", type=int, default=256, help="samples per iteration, over both ranks")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--patch", type=int, default=4)
    parser.add_argument("--period-us", type=int, default=100_000, help="period of the quota")
    arguments = parser.parse_args()
    start_ranks(2)
    rows = []
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else nullcontext() as name:
        place = [name]
        dist.broadcast_object_list(place)
        for quota in arguments.quotas:
            throttled = dist.get_rank() == 1 and quota < 1
            with cpu_quota(quota, arguments.period_us) if throttled else nullcontext():
                for stage in arguments.stages:
                    rows += measure(quota, stage, arguments, Path(place[0]))
        dist.barrier()
    parameters = sum(
        value.numel() for value in make_model(arguments.hidden, arguments.depth, arguments.patch).parameters()
    )
    columns = ("quota", "stage", "variant", "samples/s", "of the sum", "least", "most", "samples by rank")
    title = (
        f"Rank 1 of 2 under a CPU quota: ViT, {arguments.hidden} wide, {arguments.depth} deep, patch {arguments.patch} "
        f"({parameters / 1e6:.1f} M parameters), digits, {arguments.batch} samples per iteration, AdamW, fp32"
    )
    notes = [
        "`exact` is our plugin. `uniform` is our plugin with equal batches, as Colossal-AI divides. Values are medians "
        "over windows; least and most are single windows."
    ]
    print_table(title, columns, rows, notes)


if __name__ == "__main__":
    main()
