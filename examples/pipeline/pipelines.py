"""The training itself, on every rank: the same model on the same batches, once for each way to make stages."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from data import DataInfo, ImageSet, find_data, load_data, padded_batches
from findings import Display, Training, json_text, summarize
from schedule import rise_and_fall
from settings import Settings
from slow_flags import slowdowns
from slowing import repeat_passes, slowed
from small_vit import build_vit
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler
from usage import write_whole

import colossal_hetero.accelerator  # noqa: F401  (lets Colossal-AI work on a CPU, and quietly)

# isort: split
import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster

from colossal_hetero import HeteroHybridParallelPlugin
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.plans.plan import Plan, save_plan
from colossal_hetero.planner.plans.predict import predict_plan
from colossal_hetero.planner.profile.as_profiled import as_profiled
from colossal_hetero.planner.profile.layer_profile import ModelProfile, load_model_profile, save_model_profile
from colossal_hetero.planner.search.make_plans import make_plans
from colossal_hetero.probe.probe_ranks import probe_ranks
from colossal_hetero.processes.every_rank import destroy_groups
from colossal_hetero.profiling.layers.layer_profiler import profile_layers

__all__ = ["compare", "run"]

WEIGHT_DECAY = 0.05


def run(settings: Settings) -> None:
    """Join the other ranks, train, and part from them."""
    colossalai.launch_from_torch(seed=settings.seed, verbose=False)
    compare(settings)
    dist.barrier()
    destroy_groups()


def compare(settings: Settings, quiet: bool = False) -> dict[str, Any] | None:
    """Train as ``settings`` say, with all ranks of ``torch.distributed``; the summary on rank 0, None elsewhere."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    display = Display(settings, visible=rank == 0 and not quiet)
    info = find_data(settings, settings.global_batch, "--global-batch")
    images = load_data(settings, display.track)
    slow = slowdowns(settings.slow, ranks)
    trainings = []
    with display, slowed(settings.slow_by, slow) as means:
        times = slow.get(rank, 1) if means == "repeat" else 1
        parameters = sum(parameter.numel() for parameter in build_vit(settings, info.classes).parameters())
        display.start(info, parameters, get_accelerator().get_current_device(), slow, means)
        begin = time.perf_counter()
        profile, topology = _measure(settings, times, info.classes, images[0])
        profile_seconds = time.perf_counter() - begin
        kinds = [device.kind.name for device in topology.devices]
        costs = [profile.costs(kind, 1, settings.micro_batch) for kind in kinds]
        middle = profile.blocks // 2
        display.profiled(
            profile_seconds, [float(each.forward_seconds[middle] + each.backward_seconds[middle]) for each in costs]
        )
        for way in settings.ways:
            plan = _plan(settings, way, profile, topology)
            trainings.append(Trainer(settings, way, plan, times, info, images).train(display))
    if rank != 0:
        return None
    summary = summarize(settings, trainings, slow, means, profile_seconds)
    if settings.summary is not None:
        write_whole(settings.summary, json_text(summary))
    if settings.plan is not None:
        save_plan(trainings[-1].plan, settings.plan)
    if settings.plot is not None:
        from colossal_hetero.planner.report.plan_picture import plot_plan

        plot_plan(trainings[-1].plan, settings.plot)
    display.report(trainings, slow, summary)
    return summary


def _measure(settings: Settings, times: int, classes: int, images: ImageSet) -> tuple[ModelProfile, Topology]:
    """What each rank takes for a layer, and how the ranks reach each other; the same on all of them."""
    profile = None
    if settings.profile is not None and settings.profile.is_file():
        profile = load_model_profile(settings.profile)
    else:
        model = _slowed_model(settings, times, classes).to(get_accelerator().get_current_device())
        batch = images.__getitems__(list(range(settings.micro_batch)))
        profile = profile_layers(
            model,
            tuple(part.to(get_accelerator().get_current_device()) for part in batch),
            cross_entropy,
            micro_batches=[settings.micro_batch],
            optimizer="adamw",
            precision=settings.precision,
            name=f"ViT {settings.hidden}x{settings.depth}",
        ).profile
        if settings.profile is not None and dist.get_rank() == 0:
            save_model_profile(profile, settings.profile)
    return profile, as_profiled(probe_ranks(get_accelerator().get_current_device())[0], profile)


def _plan(settings: Settings, way: str, profile: ModelProfile, topology: Topology) -> Plan:
    """Stages for all ranks."""
    if way == "uniform":
        return predict_plan(
            topology,
            profile,
            [[[rank] for rank in range(dist.get_world_size())]],
            micro_batch=settings.micro_batch,
            global_batch=settings.global_batch,
            method="uniform",
        )
    return make_plans(
        topology,
        profile,
        global_batch=settings.global_batch,
        micro_batches=[settings.micro_batch],
        tensor_parallel=[1],
        stages=[dist.get_world_size()],
        method=settings.method,
        runnable=True,
        keep=1,
    )[0].plan


def _slowed_model(settings: Settings, times: int, classes: int) -> torch.nn.Module:
    """The model; with ``times`` above 1 every pass through a block is done so many times."""
    torch.manual_seed(settings.seed)
    model = build_vit(settings, classes)
    for block in model.blocks:
        repeat_passes(block, times)
    return model


class Trainer:
    """A boosted model with its optimizer and data, divided in one way."""

    def __init__(
        self,
        settings: Settings,
        way: str,
        plan: Plan,
        times: int,
        info: DataInfo,
        images: tuple[ImageSet, ImageSet],
    ) -> None:
        self._settings = settings
        self._training = Training(way, plan)
        self._images, self._held_out = images
        model = _slowed_model(settings, times, info.classes)
        self.plugin = HeteroHybridParallelPlugin(plan=plan, precision=settings.precision)
        loader = self.plugin.prepare_dataloader(
            self._images,
            batch_size=settings.global_batch,
            shuffle=True,
            drop_last=True,
            distributed_sampler_cls=functools.partial(DistributedSampler, seed=settings.seed),
            collate_fn=_as_it_is,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=WEIGHT_DECAY)
        self._iterations = len(loader) * settings.epochs
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, functools.partial(rise_and_fall, total=self._iterations)
        )
        self._booster = Booster(plugin=self.plugin)
        self._model, self._optimizer, _, self._loader, self._schedule = self._booster.boost(
            model, optimizer, criterion=_loss, dataloader=loader, lr_scheduler=schedule
        )
        self._device = get_accelerator().get_current_device()

    def train(self, display: Display) -> Training:
        """Train for all epochs; what came of it, the same on all ranks but for the times."""
        training = self._training
        display.begin(training, self._iterations)
        for epoch in range(self._settings.epochs):
            losses = []
            last = time.perf_counter()
            for loss in self._train_epoch(epoch):
                losses.append(loss)
                get_accelerator().synchronize()
                now = time.perf_counter()
                training.seconds.append(now - last)
                last = now
                display.iteration(training.seconds[-1])
            # Only the last stage knows them.
            mean = torch.stack(losses)
            dist.all_reduce(mean)
            training.loss.extend(mean.tolist())
            training.accuracy.append(self._evaluate())
            display.epoch(epoch, training)
        peaks = [0] * dist.get_world_size()
        dist.all_gather_object(peaks, int(get_accelerator().max_memory_allocated()))
        training.peak_memory_bytes = peaks
        return training

    def _train_epoch(self, epoch: int) -> Iterator[Tensor]:
        """The loop of any training script; yields each iteration's loss, 0 on all ranks but the last stage's."""
        self._model.train()
        self._loader.sampler.set_epoch(epoch)
        self._images.set_epoch(epoch)
        for batch in self._loader:
            batch = [part.to(self._device) for part in batch]
            result = self._booster.execute_pipeline(
                iter([batch]), self._model, _loss, self._optimizer, return_loss=True
            )
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
            loss = result["loss"]
            yield torch.zeros((), device=self._device) if loss is None else loss.detach().float()

    @torch.no_grad()
    def _evaluate(self) -> float:
        """The share of held-out images that are recognized. Collective over all ranks."""
        self._model.eval()
        correct = torch.zeros((), device=self._device)
        for batch in padded_batches(self._held_out, self._settings.global_batch, 0, 1):
            batch = [part.to(self._device) for part in batch]
            result = self._booster.execute_pipeline(iter([batch]), self._model, _correct, return_loss=True)
            if result["loss"] is not None:
                # The schedule divides what it adds up over the micro-batches by their number.
                correct += result["loss"] * self._settings.micro_batches
        dist.all_reduce(correct)
        return float(correct) / len(self._held_out)


def _loss(logits: Tensor, batch: list[Tensor]) -> Tensor:
    """The mean cross-entropy of ``logits [B, classes]`` for ``batch``, images and labels ``[B]``."""
    return cross_entropy(logits.float(), batch[1])


def _correct(logits: Tensor, batch: list[Tensor]) -> Tensor:
    """How many of ``logits [B, classes]`` are largest at the labels of ``batch``."""
    return (logits.argmax(1) == batch[1]).sum().float()


def _as_it_is(batch: Any) -> Any:
    """The data set hands out whole batches."""
    return batch
