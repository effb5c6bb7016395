"""Train a vision transformer with tensor parallelism on devices that are not equally fast.

    python examples/vit/train.py --balance auto --straggler 1:4

starts two ranks on this machine, makes the second four times slower, and balances the work between them. ``--help``
lists the flags. Under ``torchrun`` or ``colossalai run`` it joins the ranks that these have started.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package "examples"

from examples.common.launch import run_command
from examples.vit.options import VitOptions, check, check_options, parse_options

if __name__ == "__main__":
    # Starts the ranks; each of them imports this file and calls main().
    sys.exit(run_command("examples.vit.train", parse_options, check))

# What follows runs on every rank; it is what a training script of your own needs.

import functools
import itertools
import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler

import colossal_hetero.accelerator  # noqa: F401  (before colossalai: lets it work on a CPU, and quietly)

# isort: split
import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin

from colossal_hetero import HeteroHybridParallelPlugin
from colossal_hetero.layers import TimmViTPolicy
from colossal_hetero.testing.stragglers import inject_stragglers
from examples.common.balancing_report import BalancingReport
from examples.common.images import ImageSet, find_data, load_data, padded_batches, whole_batch
from examples.common.learning_rate import warm_up_and_decay
from examples.common.tensor_parallel import Layout
from examples.common.vit import loss_of, number_correct
from examples.vit.model import build_chosen_vit, describe_chosen_vit


def main(options: VitOptions) -> None:
    """Join the other ranks, train, and leave them."""
    colossalai.launch_from_torch(seed=options.seed, verbose=False)
    train(options)
    dist.barrier()
    dist.destroy_process_group()


def make_plugin(options: VitOptions, layout: Layout) -> HybridParallelPlugin:
    """The one line that differs from training with Colossal-AI alone."""
    arguments: dict[str, Any] = {"tp_size": layout.tp, "pp_size": layout.pp, "precision": options.precision}
    if layout.pp > 1:
        arguments["num_microbatches"] = layout.microbatches
    if options.plugin == "hetero":
        return HeteroHybridParallelPlugin(balance=options.balance_config(), **arguments)
    return HybridParallelPlugin(custom_policy=TimmViTPolicy(), **arguments)


def train(options: VitOptions, quiet: bool = False) -> dict[str, Any] | None:
    """Train on all ranks of ``torch.distributed``; returns the summary on rank 0, None elsewhere."""
    layout = check_options(options, dist.get_world_size())
    device = get_accelerator().get_current_device()
    plugin = make_plugin(options, layout)
    data = find_data(options, options.batch_size)
    report = BalancingReport(options, layout, plugin, quiet=quiet, baseline=f"chance is {1 / data.classes:.0%}")

    train_images, test_images = load_data(options, report.track)
    loader = plugin.prepare_dataloader(
        train_images,
        batch_size=layout.local_batch,
        shuffle=True,
        drop_last=True,
        distributed_sampler_cls=functools.partial(DistributedSampler, seed=options.seed),
        collate_fn=whole_batch,
    )
    iterations = min(len(loader) * options.epochs, options.steps or sys.maxsize)
    epochs = math.ceil(iterations / len(loader))

    torch.manual_seed(options.seed)
    model = build_chosen_vit(options, data.classes)
    report.start(describe_chosen_vit(options, model), str(data), epochs, iterations)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(warm_up_and_decay, total=iterations))
    booster = Booster(plugin=plugin)
    model, optimizer, _, loader, schedule = booster.boost(model, optimizer, loss_of, loader, schedule)

    stragglers = options.stragglers(layout.world_size)
    if stragglers is not None:  # for the experiment only: makes ranks slow
        inject_stragglers(model, optimizer, stragglers, len(loader))

    with report:
        for epoch in range(epochs):
            model.train()
            loader.sampler.set_epoch(epoch)
            train_images.set_epoch(epoch)
            losses: list[Tensor] = []
            report.begin_epoch()
            for batch in itertools.islice(loader, iterations - epoch * len(loader)):
                images, labels = (part.to(device) for part in batch)
                if layout.pp > 1:
                    micro_batches = iter([(images, labels)])
                    result = booster.execute_pipeline(micro_batches, model, loss_of, optimizer, return_loss=True)
                    loss = result["loss"]  # None on all stages but the last
                else:
                    loss = loss_of(model(images), (images, labels))
                    booster.backward(loss, optimizer)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(torch.zeros((), device=device) if loss is None else loss.detach().float())
                report.iteration(epoch, losses)
            mean_losses = sum_over_replicas(torch.stack(losses), plugin) / layout.dp
            report.epoch(epoch, mean_losses.tolist(), evaluate(booster, model, test_images, plugin, layout))
        if options.checkpoint is not None:
            save(booster, model, options.checkpoint)
    return report.finish()


@torch.no_grad()
def evaluate(booster: Booster, model: Any, images: ImageSet, plugin: HybridParallelPlugin, layout: Layout) -> float:
    """The share of ``images`` that the model recognizes. Collective over all ranks."""
    model.eval()
    device = get_accelerator().get_current_device()
    correct = torch.zeros((), device=device)
    replica = plugin.pg_mesh.coordinate(plugin.dp_axis)
    for batch in padded_batches(images, layout.local_batch, replica, layout.dp):
        batch = (batch[0].to(device), batch[1].to(device))
        if layout.pp > 1:
            result = booster.execute_pipeline(iter([batch]), model, number_correct, return_loss=True)
            if result["loss"] is not None:
                # The schedule divides the sum over the micro-batches by their number.
                correct += result["loss"] * layout.microbatches
        else:
            correct += number_correct(model(batch[0]), batch)
    return float(sum_over_replicas(correct, plugin)) / len(images)


def sum_over_replicas(values: Tensor, plugin: HybridParallelPlugin) -> Tensor:
    """The sum over data-parallel replicas of ``values``, of which each replica's last stage has the right ones."""
    stages = plugin.stage_manager
    counts = dist.get_rank(plugin.tp_group) == 0 and (stages is None or stages.is_last_stage())
    values = values if counts else torch.zeros_like(values)
    dist.all_reduce(values)
    return values


def save(booster: Booster, model: Any, folder: Path) -> None:
    """Write the whole model's weights as ``model.pt``. Collective over all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    logging.getLogger().addFilter(_is_not_size_advice)
    booster.save_model(model, str(folder / "model.pt"))
    logging.getLogger().removeFilter(_is_not_size_advice)


def _is_not_size_advice(record: logging.LogRecord) -> bool:
    """False for Colossal-AI's advice to save large models in parts; this one is small."""
    return "unsharded checkpointing" not in str(record.msg)
