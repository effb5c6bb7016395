"""The training itself, on every rank: boost a model, train it epoch by epoch, evaluate it, report."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from data import ImageSet, find_data, load_data, padded_batches
from display import Display, Shares
from model import build_model
from options import Layout, Options, check_options
from results import Measurements, TensorBoardLog, TraceFile, summarize, write_summary, write_timelines
from schedule import rise_and_fall
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

import colossal_hetero.accelerator  # noqa: F401  (lets Colossal-AI work on a CPU, and quietly)

# isort: split
import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin

from colossal_hetero import HeteroHybridParallelPlugin
from colossal_hetero.balance.report.timeline import Timelines
from colossal_hetero.layers import TimmViTPolicy
from colossal_hetero.processes.every_rank import destroy_groups
from colossal_hetero.testing.stragglers import Stragglers, inject_stragglers, parse_slowdowns

__all__ = ["run", "train"]

WEIGHT_DECAY = 0.05


def run(options: Options) -> None:
    """Join the other ranks, train, and part from them."""
    colossalai.launch_from_torch(seed=options.seed, verbose=False)
    train(options)
    dist.barrier()
    destroy_groups()


def train(options: Options, quiet: bool = False) -> dict[str, Any] | None:
    """Train as ``options`` say, with all ranks of ``torch.distributed``; the summary on rank 0, None elsewhere."""
    rank = dist.get_rank()
    display = Display(options, visible=rank == 0 and not quiet)
    layout = check_options(options, dist.get_world_size())
    info = find_data(options, options.batch_size)
    train_images, test_images = load_data(options, display.track)
    trainer = Trainer(options, layout, info.classes, train_images, test_images)
    display.start(layout, info, trainer.parameters, trainer.device, trainer.epochs, trainer.total)
    measurements = Measurements(options, layout, trainer.stragglers)
    trace = TraceFile(options.trace if rank == 0 else None, measurements)
    log = TensorBoardLog(options.tensorboard if rank == 0 else None, measurements)
    get_accelerator().reset_peak_memory_stats()
    with display, trace, log:
        for epoch in range(trainer.epochs):
            losses = []
            last = time.perf_counter()
            for loss in trainer.train_epoch(epoch):
                # The loss of the iteration before is ready; asking for the latest would make the host wait for a GPU.
                display.iteration(losses[-1].item() if losses else None, trainer.shares)
                losses.append(loss)
                now = time.perf_counter()
                measurements.iteration(epoch, now - last)
                last = now
            measurements.losses(trainer.mean_losses(losses))
            accuracy = trainer.evaluate()
            measurements.epoch(accuracy, trainer.collect())
            trace.write()
            log.write(epoch)
            display.epoch(epoch, measurements)
        peaks: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(peaks, int(get_accelerator().max_memory_allocated()))
        trainer.save()
        timelines = trainer.timelines()
    if rank != 0:
        return None
    summary = summarize(measurements, peaks)
    if options.summary is not None:
        write_summary(summary, options.summary)
    write_timelines(timelines, options.plot, options.chrome_trace)
    display.report(measurements, summary)
    return summary


class Trainer:
    """A boosted model with its optimizer and data."""

    def __init__(
        self, options: Options, layout: Layout, classes: int, train_images: ImageSet, test_images: ImageSet
    ) -> None:
        self._options = options
        self._layout = layout
        self._images, self._held_out = train_images, test_images
        self.plugin = _make_plugin(options, layout)
        self.device = get_accelerator().get_current_device()
        loader = self.plugin.prepare_dataloader(
            train_images,
            batch_size=layout.local_batch,
            shuffle=True,
            drop_last=True,
            distributed_sampler_cls=functools.partial(DistributedSampler, seed=options.seed),
            collate_fn=_as_it_is,
        )
        self.total = len(loader) * options.epochs
        if options.steps is not None:
            self.total = min(self.total, options.steps)
        self.epochs = math.ceil(self.total / len(loader))
        model = build_model(options, classes)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(rise_and_fall, total=self.total))
        self._booster = Booster(plugin=self.plugin)
        self._model, self._optimizer, _, self._loader, self._schedule = self._booster.boost(
            model, optimizer, criterion=_loss, dataloader=loader, lr_scheduler=schedule
        )
        self._done = 0
        self.stragglers: Stragglers | None = None
        if options.straggler is not None:
            self.stragglers = Stragglers(
                slowdowns=parse_slowdowns(options.straggler),
                schedule=options.straggler_schedule,  # type: ignore[arg-type]
                period=options.straggler_period,  # type: ignore[arg-type]
                means=options.straggler_means,  # type: ignore[arg-type]
                seed=options.seed,
            )
            inject_stragglers(self._model, self._optimizer, self.stragglers, len(loader))

    @property
    def shares(self) -> list[Shares]:
        """What each rank of this tensor-parallel group prunes, gives away and takes on; empty without balancing."""
        balancer = getattr(self.plugin, "balancer", None)
        if balancer is None or not balancer.active:
            return []
        plan = balancer.plan
        return [Shares(*shares) for shares in zip(plan.resize, plan.migrate, plan.receive, strict=True)]

    def train_epoch(self, epoch: int) -> Iterator[Tensor]:
        """Train on every image once, or until the last iteration; yields each iteration's loss on this rank.

        In a pipeline only the last stage knows the loss; it is 0 on the others.
        """
        self._model.train()
        self._loader.sampler.set_epoch(epoch)
        self._images.set_epoch(epoch)
        for batch in self._loader:
            if self._done == self.total:
                return
            self._done += 1
            yield self._iterate([part.to(self.device) for part in batch])

    def _iterate(self, batch: list[Tensor]) -> Tensor:
        if self._layout.pp > 1:
            result = self._booster.execute_pipeline(
                iter([batch]), self._model, _loss, self._optimizer, return_loss=True
            )
            loss = result["loss"]
        else:
            loss = _loss(self._model(batch[0]), batch)
            self._booster.backward(loss, self._optimizer)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return torch.zeros((), device=self.device) if loss is None else loss.detach().float()

    @torch.no_grad()
    def evaluate(self) -> float:
        """The share of held-out images that are recognized. Collective over all ranks."""
        self._model.eval()
        replica = self.plugin.pg_mesh.coordinate(self.plugin.dp_axis)
        correct = torch.zeros((), device=self.device)
        for batch in padded_batches(self._held_out, self._layout.local_batch, replica, self._layout.dp):
            batch = [part.to(self.device) for part in batch]
            if self._layout.pp > 1:
                result = self._booster.execute_pipeline(iter([batch]), self._model, _correct, return_loss=True)
                if result["loss"] is not None:
                    # The schedule divides what it adds up over the micro-batches by their number.
                    correct += result["loss"] * self._layout.microbatches
            else:
                correct += _correct(self._model(batch[0]), batch)
        if not self._counts:
            correct.zero_()
        dist.all_reduce(correct)
        return float(correct) / len(self._held_out)

    def mean_losses(self, losses: list[Tensor]) -> list[float]:
        """The losses of the same iterations over all replicas. Collective over all ranks."""
        mean = torch.stack(losses)
        if not self._counts:
            mean.zero_()
        dist.all_reduce(mean)
        return (mean / self._layout.dp).tolist()

    @property
    def _counts(self) -> bool:
        """Whether this rank speaks for its replica: one rank of the last stage."""
        stages = self.plugin.stage_manager
        return dist.get_rank(self.plugin.tp_group) == 0 and (stages is None or stages.is_last_stage())

    def collect(self) -> list[Any] | None:
        """The balancer's records since the last call on rank 0, None elsewhere or with Colossal-AI's plugin."""
        balancer = getattr(self.plugin, "balancer", None)
        return None if balancer is None else balancer.collect()

    def timelines(self) -> Timelines | None:
        """An iteration before and one after balancing on rank 0, None elsewhere. Collective over all ranks."""
        balancer = getattr(self.plugin, "balancer", None)
        return None if balancer is None else balancer.timelines()

    def save(self) -> None:
        """Write the weights as one file, if that is asked for. Collective over all ranks."""
        if self._options.checkpoint is None:
            return
        self._options.checkpoint.mkdir(parents=True, exist_ok=True)
        logging.getLogger().addFilter(_is_not_size_advice)
        self._booster.save_model(self._model, str(self._options.checkpoint / "model.pt"))
        logging.getLogger().removeFilter(_is_not_size_advice)


def _make_plugin(options: Options, layout: Layout) -> HybridParallelPlugin:
    common: dict[str, Any] = {"tp_size": layout.tp, "pp_size": layout.pp, "precision": options.precision}
    if layout.pp > 1:
        common["num_microbatches"] = layout.microbatches
    if options.plugin == "hetero":
        return HeteroHybridParallelPlugin(balance=options.balance_config(), **common)
    return HybridParallelPlugin(custom_policy=TimmViTPolicy(), **common)


def _loss(logits: Tensor, batch: list[Tensor]) -> Tensor:
    """The mean cross-entropy of ``logits [B, classes]`` for ``batch``, images and labels ``[B]``."""
    return cross_entropy(logits.float(), batch[1])


def _correct(logits: Tensor, batch: list[Tensor]) -> Tensor:
    """How many of ``logits [B, classes]`` are largest at the labels of ``batch``."""
    return (logits.argmax(1) == batch[1]).sum().float()


def _is_not_size_advice(record: logging.LogRecord) -> bool:
    """Whether a log record is something else than the advice to save large models in parts; these are small."""
    return "unsharded checkpointing" not in str(record.msg)


def _as_it_is(batch: Any) -> Any:
    """The data set hands out whole batches."""
    return batch
