"""Train with ZeRO on devices that are not equally fast, with equal batches and with batches that fit each device.

    python examples/zero/train.py

starts two ranks on this machine, makes the second four times slower, trains both ways, and compares. ``--help`` lists
the flags. Under ``torchrun`` or ``colossalai run`` it joins the ranks that these have started.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package "examples"

from examples.common.launch import run_command
from examples.zero.options import ZeroOptions, check, parse_options

if __name__ == "__main__":
    # Starts the ranks; each of them imports this file and calls main().
    sys.exit(run_command("examples.zero.train", parse_options, check))

# What follows runs on every rank; it is what a training script of your own needs.

import functools
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

import colossal_hetero.accelerator  # noqa: F401  (before colossalai: lets it work on a CPU, and quietly)

# isort: split
import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster

from colossal_hetero import BatchConfig, HeteroZeroPlugin
from colossal_hetero.testing.stragglers import repeat_passes
from examples.common.images import DataInfo, ImageSet, find_data, load_data, padded_batches, whole_batch
from examples.common.learning_rate import warm_up_and_decay
from examples.common.options import UsageError, slowdowns
from examples.common.slow_processes import quota_or_repeat
from examples.common.vit import build_vit, describe_vit
from examples.zero.report import ZeroReport, ZeroTraining


def main(options: ZeroOptions) -> None:
    """Join the other ranks, train, and leave them."""
    colossalai.launch_from_torch(seed=options.seed, verbose=False)
    compare(options)
    dist.barrier()
    dist.destroy_process_group()


def compare(options: ZeroOptions, quiet: bool = False) -> dict[str, Any] | None:
    """Train with each method on all ranks of ``torch.distributed``; the summary on rank 0, None elsewhere."""
    factors = slowdowns(options.straggler, dist.get_world_size())
    report = ZeroReport(options, factors, quiet)
    data = find_data(options, options.global_batch, "--global-batch")
    images = load_data(options, report.track)
    with report, quota_or_repeat(options.straggler_means, factors) as means, shared_profile(options) as profile:
        for method in options.methods:
            train(options, method, profile, data, images, means, report)
    return report.finish()


def train(
    options: ZeroOptions,
    method: str,
    profile: Path | None,
    data: DataInfo,
    images: tuple[ImageSet, ImageSet],
    means: str,
    report: ZeroReport,
) -> None:
    """Train once, with global batches divided by ``method``; ``means`` is how ranks are slowed."""
    train_images, test_images = images
    device = get_accelerator().get_current_device()
    torch.manual_seed(options.seed)
    model = build_vit(data.classes, **options.vit_sizes)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if means == "repeat":  # for the experiment only: makes this rank slow
        repeat_passes(model, report.factors.get(dist.get_rank(), 1))

    plugin = HeteroZeroPlugin(
        stage=options.stage if options.stage == "auto" else int(options.stage),
        batches=BatchConfig(global_batch_size=options.global_batch, method=method, profile=profile),
        precision=options.precision,
    )
    loader = plugin.prepare_dataloader(
        train_images, shuffle=True, seed=options.seed, drop_last=True, collate_fn=whole_batch
    )
    iterations = loader.global_batches * options.epochs
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(warm_up_and_decay, total=iterations))
    booster = Booster(plugin=plugin)
    start = time.perf_counter()
    try:
        model, optimizer, criterion, loader, schedule = booster.boost(model, optimizer, loss_of, loader, schedule)
    except ValueError as error:
        # The same on every rank: the profile is of something else, or a sample does not fit in memory.
        raise UsageError(str(error)) from None
    training = ZeroTraining(method, stage=int(plugin.stage), boost_seconds=time.perf_counter() - start)
    if not report.trainings:
        texts = describe_vit(parameters, **options.vit_sizes), f"{data}; {options.global_batch} per iteration"
        report.start(*texts, means, f", ZeRO stage {training.stage}")

    with report.training(training, f"{method} (ready after {training.boost_seconds:.1f} s)", iterations):
        for epoch in range(options.epochs):
            training.allocations.append(plugin.allocation)
            model.train()
            loader.set_epoch(epoch)
            train_images.set_epoch(epoch)
            losses: list[float] = []
            last = time.perf_counter()
            for batch, labels in loader:  # micro-batches; the plugin makes global batches of them
                loss = criterion(model(batch.to(device)), labels.to(device))
                booster.backward(loss, optimizer)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

                mean = loader.mean(loss)  # over the global batch and all ranks, at its last micro-batch
                if mean is not None:
                    losses.append(mean)
                    last, seconds = time.perf_counter(), time.perf_counter() - last
                    report.iteration(seconds)
            shares = " + ".join(str(share.samples) for share in training.allocation.shares)
            report.epoch(epoch, losses, evaluate(model, test_images), f"  images by rank {shares}")
    training.reallocations = plugin.batch_balancer.reallocations


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of ``logits [B, classes]`` for ``labels [B]``."""
    return cross_entropy(logits.float(), labels)


@torch.no_grad()
def evaluate(model: Any, images: ImageSet) -> float:
    """The share of ``images`` that the model recognizes. Collective over all ranks."""
    model.eval()
    device = get_accelerator().get_current_device()
    correct = torch.zeros((), device=device)
    for batch, labels in padded_batches(images, 32, dist.get_rank(), dist.get_world_size()):
        correct += (model(batch.to(device)).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(correct)
    return float(correct) / len(images)


@contextmanager
def shared_profile(options: ZeroOptions) -> Iterator[Path | None]:
    """A file through which both methods use the same measurements: the user's, or one that lasts as long as this run.

    None where one method is enough, or ranks on several machines would not find the same file.
    """
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if options.profile is not None or len(options.methods) == 1 or options.stage == "auto" or not one_machine:
        yield options.profile
        return
    with ExitStack() as stack:
        place: list[str | None] = [None]
        if dist.get_rank() == 0:
            place[0] = stack.enter_context(tempfile.TemporaryDirectory(prefix="example_"))
        dist.broadcast_object_list(place)
        yield Path(str(place[0]), "profile.json")
