"""Train in a pipeline on devices that are not equally fast: with equal stages, and with stages that fit each device.

    python examples/pipeline/train.py

starts two ranks on this machine, makes the second four times slower, trains both ways, and compares. ``--help`` lists
the flags. Under ``torchrun`` or ``colossalai run`` it joins the ranks that these have started.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package "examples"

from examples.common.launch import run_command
from examples.pipeline.options import PipelineOptions, check, parse_options

if __name__ == "__main__":
    # Starts the ranks; each of them imports this file and calls main().
    sys.exit(run_command("examples.pipeline.train", parse_options, check))

# What follows runs on every rank; it is what a training script of your own needs.

import functools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

import colossal_hetero.accelerator  # noqa: F401  (before colossalai: lets it work on a CPU, and quietly)

# isort: split
import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster

from colossal_hetero import HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.cli.probe_ranks import probe_ranks
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.price import price_ranks
from colossal_hetero.planner.profile.fitted_profiles import as_profiled
from colossal_hetero.planner.profile.layer_profile import ModelProfile, load_profile, save_profile
from colossal_hetero.planner.report.plan_table import one_line
from colossal_hetero.planner.solver.problem import Problem
from colossal_hetero.planner.solver.search import search
from colossal_hetero.profiling.layer_profiler import profile_layers
from colossal_hetero.testing.stragglers import repeat_passes
from examples.common.images import ImageSet, find_data, load_data, padded_batches, whole_batch
from examples.common.learning_rate import warm_up_and_decay
from examples.common.options import slowdowns
from examples.common.slow_processes import quota_or_repeat
from examples.common.vit import build_vit, describe_vit, loss_of, number_correct
from examples.pipeline.report import PipelineReport, PipelineTraining


def main(options: PipelineOptions) -> None:
    """Join the other ranks, train, and leave them."""
    colossalai.launch_from_torch(seed=options.seed, verbose=False)
    compare(options)
    dist.barrier()
    dist.destroy_process_group()


def compare(options: PipelineOptions, quiet: bool = False) -> dict[str, Any] | None:
    """Train with stages made in each way, on all ranks of ``torch.distributed``; the summary on rank 0, else None."""
    factors = slowdowns(options.straggler, dist.get_world_size())
    report = PipelineReport(options, factors, quiet)
    data = find_data(options, options.global_batch, "--global-batch")
    images = load_data(options, report.track)
    with report, quota_or_repeat(options.straggler_means, factors) as means:
        times = factors.get(dist.get_rank(), 1) if means == "repeat" else 1
        make_model = functools.partial(build_slowed_vit, options, data.classes, times)
        parameters = sum(parameter.numel() for parameter in make_model().parameters())
        batches = f"{options.global_batch} per iteration, {options.micro_batch} at a time"
        report.start(describe_vit(parameters, **options.vit_sizes), f"{data}; {batches}", means)
        profile, topology = measure(options, make_model, images[0], report)
        for way in options.ways:
            plan = make_plan(options, way, profile, topology)
            train(options, PipelineTraining(way, plan=plan), make_model(), images, report)
    return report.finish()


def build_slowed_vit(options: PipelineOptions, classes: int, times: int) -> Any:
    """The model; for the experiment every pass through a block is done ``times`` times."""
    torch.manual_seed(options.seed)
    model = build_vit(classes, **options.vit_sizes)
    for block in model.blocks:
        repeat_passes(block, times)
    return model


def measure(
    options: PipelineOptions, make_model: Any, images: ImageSet, report: PipelineReport
) -> tuple[ModelProfile, Topology]:
    """How long each layer takes on each rank, and how the ranks reach each other; the same on all ranks."""
    start = time.perf_counter()
    device = get_accelerator().get_current_device()
    if options.profile is not None and options.profile.is_file():
        profile = load_profile(options.profile)
    else:
        batch = images.__getitems__(list(range(options.micro_batch)))
        profile = profile_layers(
            make_model().to(device),
            tuple(part.to(device) for part in batch),
            cross_entropy,
            micro_batches=[options.micro_batch],
            optimizer="adamw",
            precision=options.precision,
            name=f"ViT {options.hidden}x{options.depth}",
        ).profile
        if options.profile is not None and dist.get_rank() == 0:
            save_profile(profile, options.profile)
    topology = as_profiled(probe_ranks(device)[0], profile)
    report.profiled(time.perf_counter() - start, profile, topology)
    return profile, topology


def make_plan(options: PipelineOptions, way: str, profile: ModelProfile, topology: Topology) -> Plan:
    """One pipeline over all ranks, with equally many blocks in each stage or with stages that fit the ranks; or the
    best plan for all ranks, of equal replicas or of any."""
    ranks = dist.get_world_size()
    if way == "uniform":
        in_order = [[(rank,) for rank in range(ranks)]]
        sizes = {"micro_batch": options.micro_batch, "global_batch": options.global_batch}
        return price_ranks(topology, profile, in_order, **sizes, method="uniform")
    problem = Problem(
        topology=topology,
        profile=profile,
        global_batch=options.global_batch,
        micro_batches=[options.micro_batch],
        tensor_parallel=[1],
        stages=[ranks] if way == "planned" else None,
        method=options.method,
        unequal=way == "any",
        all_devices=True,
        recompute=False,
        zero_stages=(0,),
    )
    return search(problem, keep=1).best


def train(
    options: PipelineOptions, training: PipelineTraining, model: Any, images: tuple[ImageSet, ImageSet], report: Any
) -> None:
    """Train once, with the stages of a plan."""
    train_images, test_images = images
    device = get_accelerator().get_current_device()
    # Layer by layer also in equal replicas, so that both plans get the same global batches.
    planning = PlanConfig(layer_sums=options.way == "replicas")
    plugin = HeteroHybridParallelPlugin(plan=training.plan, planning=planning, precision=options.precision)
    loader = plugin.prepare_dataloader(
        train_images, shuffle=True, seed=options.seed, drop_last=True, collate_fn=whole_batch, **sampler_of(options)
    )
    iterations = len(loader) * options.epochs
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(warm_up_and_decay, total=iterations))
    booster = Booster(plugin=plugin)
    model, optimizer, _, loader, schedule = booster.boost(model, optimizer, loss_of, loader, schedule)
    with report.training(training, f"{training.name}: {one_line(training.plan)}", iterations):
        for epoch in range(options.epochs):
            model.train()
            (loader if planning.layer_sums else loader.sampler).set_epoch(epoch)
            train_images.set_epoch(epoch)
            losses = torch.zeros(len(loader), device=device)  # known on the last stage, 0 on the others
            last = time.perf_counter()
            for step, batch in enumerate(loader):
                micro_batches = iter([tuple(part.to(device) for part in batch)])
                result = booster.execute_pipeline(micro_batches, model, loss_of, optimizer, return_loss=True)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if result["loss"] is not None:
                    losses[step] = result["loss"].detach().float() * (len(batch[1]) / options.global_batch)
                get_accelerator().synchronize()
                last, seconds = time.perf_counter(), time.perf_counter() - last
                report.iteration(seconds)
            dist.all_reduce(losses)
            report.epoch(epoch, losses.tolist(), evaluate(booster, model, test_images, options))


def sampler_of(options: PipelineOptions) -> dict[str, Any]:
    """The sampler of a pipeline's loader, whose order follows the seed; loaders of replicas have one of their own."""
    if options.way == "replicas":
        return {}
    return {"distributed_sampler_cls": functools.partial(DistributedSampler, seed=options.seed)}


@torch.no_grad()
def evaluate(booster: Booster, model: Any, images: ImageSet, options: PipelineOptions) -> float:
    """The share of ``images`` that the model recognizes. Collective over all ranks."""
    model.eval()
    device = get_accelerator().get_current_device()
    correct = torch.zeros((), device=device)
    for batch in padded_batches(images, options.global_batch, *booster.plugin.replica()):
        batch = tuple(part.to(device) for part in batch)
        result = booster.execute_pipeline(iter([batch]), model, number_correct, return_loss=True)
        if result["loss"] is not None:
            # The schedule divides the sum over the micro-batches by their number.
            correct += result["loss"] * options.micro_batches
    dist.all_reduce(correct)
    return float(correct) / len(images)
