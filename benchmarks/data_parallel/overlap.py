"""Time of a training iteration with and without overlapped communication, against what it cannot be shorter than.

Two ranks are processes in two network namespaces, with NICs of limited bandwidth, and communicate over Gloo. They
train a vision transformer with ``HeteroZeroPlugin(stage=1)`` in fp32, and with the hybrid plugin and ``zero_stage=1``
in bf16. The batch is chosen such that computing an iteration takes ``--ratio`` times as long as its communication. With
1.0, the forward pass, a third of the computation, could not hide the all-gather, half of the communication. Ways of
training take turns in the same processes. The bound is the longer one of computation alone (both ranks run a plain
training loop at the same time) and communication alone (a reduce-scatter and an all-gather of all parameters).

    sudo python -m benchmarks.data_parallel.overlap [--megabits MBIT] [--ratio R] [--rounds N] [--iterations N]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.common import medians_in_turns, print_table, read_options, slowest, steady_seconds
from benchmarks.pipeline.namespaces import nodes, run_in_namespaces

# isort: split
from colossalai.booster import Booster

from colossal_hetero import BatchConfig, HeteroHybridParallelPlugin, HeteroZeroPlugin

RANKS = 2
CLASSES = 10
MODEL = dict(img_size=64, patch_size=16, num_classes=CLASSES, embed_dim=384, depth=6, num_heads=6)
TRIED = (4, 12)
"""Samples of the batches from which the time per sample is computed."""
PLUGINS = {"HeteroZeroPlugin(stage=1), fp32": torch.float32, "hybrid plugin, zero_stage=1, bf16": torch.bfloat16}
WAYS: dict[str, dict[str, bool]] = {
    "without overlap": dict(overlap_communication=False, overlap_allgather=False),
    "gradients overlap": dict(overlap_communication=True, overlap_allgather=False),
    "both overlap": dict(overlap_communication=True, overlap_allgather=True),
}
ALONE = "without communication"
BUCKET = 0.5
"""Millions (2²⁰) of gradients in a bucket."""


class Images(Dataset):
    """Images that need no time to load."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._image = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._image, index % CLASSES


def make_model() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(**MODEL)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), labels)


@dataclass
class Training:
    """A model in training."""

    iterate: Callable[[], None]
    """Run an iteration; updated parameters may still be on their way afterwards."""
    settle: Callable[[], None] = lambda: None
    """Wait for them."""

    def seconds(self, iterations: int) -> float:
        """Of an iteration of the slowest rank, in steady state."""
        self.settle()
        seconds = steady_seconds(self.iterate, iterations)
        self.settle()
        return seconds


def train_alone(batch: int, dtype: torch.dtype) -> Training:
    """A plain training loop without communication."""
    model = make_model().to(dtype)
    optimizer = make_optimizer(model)
    images, labels = torch.randn(batch, 3, 64, 64, dtype=dtype), torch.arange(batch) % CLASSES

    def iterate() -> None:
        loss_of(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(iterate)


def train_with_zero(batch: int, options: dict[str, bool], profile: str) -> Training:
    """``profile`` is the file in which the measured speed is kept for the next call."""
    plugin = HeteroZeroPlugin(
        1,
        batches=BatchConfig(global_batch_size=RANKS * batch, method="uniform", profile=profile, max_micro_batch=batch),
        reduce_bucket_size_in_m=BUCKET,
        **options,
    )
    loader = plugin.prepare_dataloader(Images(RANKS * batch * 100_000))
    model = make_model()
    model, optimizer, criterion, loader, _ = Booster(plugin=plugin).boost(model, make_optimizer(model), loss_of, loader)
    batches = iter(loader)

    def iterate() -> None:
        images, labels = next(batches)
        optimizer.backward(criterion(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()

    return Training(iterate, optimizer._force_wait_all_gather)


def train_with_hybrid(batch: int, options: dict[str, bool], profile: str) -> Training:
    """The batch is given, so that no ``profile`` is needed."""
    plugin = HeteroHybridParallelPlugin(
        tp_size=1, pp_size=1, zero_stage=1, precision="bf16", zero_bucket_size_in_m=BUCKET, **options
    )
    model, booster = make_model(), Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, make_optimizer(model), loss_of)
    images, labels = torch.randn(batch, 3, 64, 64), torch.arange(batch) % CLASSES

    def iterate() -> None:
        booster.backward(loss_of(model(images), labels), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return Training(iterate, optimizer._force_wait_all_gather)


def communicating_seconds(dtype: torch.dtype, rounds: int = 3) -> float:
    """Of a reduce-scatter and an all-gather of all parameters."""
    elements = sum(parameter.numel() for parameter in make_model().parameters())
    shard = torch.ones(-(-elements // RANKS), dtype=dtype)
    whole = torch.ones(RANKS * len(shard), dtype=dtype)
    found = []
    for _ in range(rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        dist.reduce_scatter_tensor(shard, whole)
        dist.all_gather_into_tensor(whole, shard)
        found.append(time.perf_counter() - begin)
    return slowest(median(found[1:]))


class Measured(NamedTuple):
    """Seconds of an iteration with one plugin."""

    batch: int
    """Samples per rank."""
    computing: float
    communicating: float
    by_way: dict[str, float]


def run_rank(arguments: argparse.Namespace) -> list[Measured]:
    """The measurements of each plugin."""
    results = []
    for dtype, train in zip(PLUGINS.values(), (train_with_zero, train_with_hybrid), strict=True):
        communicating = communicating_seconds(dtype)
        few, many = (train_alone(samples, dtype).seconds(3) for samples in TRIED)
        per_sample = max((many - few) / (TRIED[1] - TRIED[0]), many / TRIED[1] / 2)
        fixed = max(many - TRIED[1] * per_sample, 0.0)
        batch = max(1, round((arguments.ratio * communicating - fixed) / per_sample))
        trainings = {name: train(batch, options, arguments.profile) for name, options in WAYS.items()}
        trainings[ALONE] = train_alone(batch, dtype)
        timed = {name: partial(each.seconds, arguments.iterations) for name, each in trainings.items()}
        by_way = medians_in_turns(timed, arguments.rounds)
        communicating = median([communicating, communicating_seconds(dtype)])
        results.append(Measured(batch, by_way.pop(ALONE), communicating, by_way))
    return results


def main() -> None:
    arguments = read_options(__doc__, megabits=400.0, ratio=1.25, rounds=5, iterations=4)
    with (
        nodes([RANKS], arguments.megabits, arguments.megabits) as places,
        tempfile.TemporaryDirectory(prefix="overlap") as folder,
    ):
        arguments.profile = str(Path(folder, "profile.json"))
        results = run_in_namespaces(places, run_rank, arguments)[0]
    rows = []
    for plugin, measured in zip(PLUGINS, results, strict=True):
        bound = max(measured.computing, measured.communicating)
        plain = measured.by_way["without overlap"]
        for way, seconds in measured.by_way.items():
            times = (seconds / plain, seconds / bound)
            alone = (f"{measured.computing:.3f}", f"{measured.communicating:.3f}")
            rows.append([plugin, way, f"{seconds:.3f}", *(f"{each:.2f}" for each in times), measured.batch, *alone])
    print_table(
        f"two ranks, {arguments.megabits:g} Mbit/s; aims: ≤ 0.65 of the time without overlap, ≤ 1.10 of the bound",
        ["plugin", "way", "iteration [s]", "× without", "× bound", "batch", "computation [s]", "communication [s]"],
        rows,
    )


if __name__ == "__main__":
    main()
