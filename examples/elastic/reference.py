"""What the demonstration does in one process: measure the layers, and train without any disturbance."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from colossal_hetero.planner.cluster.cluster_file import save_cluster
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.price import price_ranks
from colossal_hetero.planner.profile.layer_profile import ModelProfile, save_profile
from colossal_hetero.profiling.layer_profiler import profile_layers
from examples.common.images import ImageSet, load_data
from examples.common.learning_rate import warm_up_and_decay
from examples.elastic.model import DTYPES, make_model
from examples.elastic.options import NODES, ElasticOptions

LARGE, SMALL = "cpu", "small-cpu"
SMALL_NODE = NODES[3]
SMALL_SHARE = 0.7
"""Memory of the small device, as a share of what one device needs for the whole model."""
MIN_SECONDS = 0.5
"""Shortest measurement of the layers. Few parts are timed, and the plans need rough times only."""


def make_files(options: ElasticOptions, cluster: Path, profile: Path) -> None:
    """Measure the layers on this machine, and write the two files that plans are made from.

    The cluster has nodes with a CPU each. One of them has too little memory for the whole model, so that it shares a
    replica with another one, and replicas are not alike.
    """
    torch.set_num_threads(1)
    images = _train_images(options)
    samples = images.__getitems__(list(range(options.micro_batch)))
    measured = profile_layers(
        make_model(options, _classes(images)),
        (samples[0].to(DTYPES[options.precision]), samples[1]),
        cross_entropy,
        micro_batches=[options.micro_batch],
        optimizer="adamw",
        name=f"ViT {options.hidden}x{options.depth}",
        min_seconds=MIN_SECONDS,
    ).profile
    (times,) = measured.times
    kinds = tuple(times.model_copy(update={"device": name}) for name in (LARGE, SMALL))
    layers = measured.model_copy(update={"times": kinds, "rank_devices": (), "context_bytes": {}})
    save_profile(layers, profile)
    save_cluster(_cluster(options, layers), cluster)


def _cluster(options: ElasticOptions, profile: ModelProfile) -> Topology:
    memory, network = Channel("shared memory", 1e10, 1e-6), Channel("Ethernet", 1e9, 1e-5)
    large = DeviceKind(LARGE, 10**12, 1e11)
    alone = Topology((Device(large, 0, 0),), (Node(NODES[0], 0, (0,), memory, (network,)),), ("here",))
    sizes = {"micro_batch": options.micro_batch, "global_batch": options.global_batch}
    needed = price_ranks(alone, profile, [[[0]]], **sizes).replicas[0].stages[0].memory_bytes
    small = DeviceKind(SMALL, round(needed * SMALL_SHARE), 1e11)
    devices = tuple(Device(small if name == SMALL_NODE else large, number, 0) for number, name in enumerate(NODES))
    nodes = tuple(Node(name, 0, (number,), memory, (network,)) for number, name in enumerate(NODES))
    return Topology(devices, nodes, ("here",))


class Undisturbed:
    """The same training in plain PyTorch: one process, the same images in the same order."""

    def __init__(self, options: ElasticOptions) -> None:
        torch.set_num_threads(1)
        self._options = options
        self._images = _train_images(options)
        self.steps_per_epoch = len(self._images) // options.global_batch
        self.model = make_model(options, _classes(self._images))

    def losses(self) -> Iterator[float]:
        """Train, and yield the loss of each step."""
        options, dtype = self._options, DTYPES[self._options.precision]
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, weight_decay=0.05)
        total = self.steps_per_epoch * options.epochs
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(warm_up_and_decay, total=total))
        for epoch in range(options.epochs):
            self._images.set_epoch(epoch)
            generator = torch.Generator().manual_seed(options.seed + epoch)
            order = torch.randperm(len(self._images), generator=generator)
            for step in range(self.steps_per_epoch):
                chosen = order[step * options.global_batch : (step + 1) * options.global_batch]
                images, labels = self._images.__getitems__(chosen.tolist())
                loss = cross_entropy(self.model(images.to(dtype)), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                yield loss.item()


@torch.no_grad()
def accuracy(options: ElasticOptions, model: Any) -> float:
    """The share of the images held out that the model recognizes."""
    _, images = load_data(options, lambda items, what: iter(items))
    pixels, labels = images.__getitems__(list(range(len(images))))
    model.eval()
    return float((model(pixels.to(DTYPES[options.precision])).argmax(1) == labels).double().mean())


def _train_images(options: ElasticOptions) -> ImageSet:
    return load_data(options, lambda items, what: iter(items))[0]


def _classes(images: ImageSet) -> int:
    return int(images.labels.max()) + 1
