"""The training itself, on every rank: the same model on the same batches, once for each way to divide them."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from choices import Choices
from data import DataInfo, ImageSet, find_data, load_data, padded_batches
from outcome import Display, Training, json_text, summarize
from schedule import rise_and_fall
from slow_flags import slowdowns
from slowing import repeat_passes, slowed
from small_vit import build_vit
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate
from usage import UsageError, write_whole

import colossal_hetero.accelerator  # noqa: F401  (lets Colossal-AI work on a CPU, and quietly)

# isort: split
import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster

from colossal_hetero import HeteroZeroPlugin
from colossal_hetero.processes.every_rank import destroy_groups

__all__ = ["compare", "run"]

WEIGHT_DECAY = 0.05


def run(choices: Choices) -> None:
    """Join the other ranks, train, and part from them."""
    colossalai.launch_from_torch(seed=choices.seed, verbose=False)
    compare(choices)
    dist.barrier()
    destroy_groups()


def compare(choices: Choices, quiet: bool = False) -> dict[str, Any] | None:
    """Train as ``choices`` say, with all ranks of ``torch.distributed``; the summary on rank 0, None elsewhere."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    display = Display(choices, visible=rank == 0 and not quiet)
    info = find_data(choices, choices.global_batch, "--global-batch")
    images = load_data(choices, display.track)
    slow = slowdowns(choices.slow, ranks)
    trainings = []
    with display, slowed(choices.slow_by, slow) as means, _profile_file(choices) as profile:
        for method in choices.methods:
            trainer = Trainer(choices, method, slow.get(rank, 1) if means == "repeat" else 1, profile, info, images)
            if not trainings:
                display.start(info, trainer.parameters, trainer.device, trainer.stage, slow, means)
            trainings.append(trainer.train(display))
    if rank != 0:
        return None
    summary = summarize(choices, trainings, slow, means)
    if choices.summary is not None:
        write_whole(choices.summary, json_text(summary))
    display.report(trainings, slow, summary)
    return summary


@contextmanager
def _profile_file(choices: Choices) -> Iterator[Path | None]:
    """Where both ways of training find the same measurements: the user's file, else one of this run if all ranks see
    it."""
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if choices.profile is not None or len(choices.methods) == 1 or choices.stage == "auto" or not alone:
        yield choices.profile
        return
    with ExitStack() as stack:
        place: list[str | None] = [None]
        if dist.get_rank() == 0:
            place[0] = stack.enter_context(tempfile.TemporaryDirectory(prefix="example_"))
        dist.broadcast_object_list(place)
        assert place[0] is not None
        yield Path(place[0], "profile.json")


class Trainer:
    """A boosted model with its optimizer and data, its batches divided in one way."""

    def __init__(
        self,
        choices: Choices,
        method: str,
        times: int,
        profile: Path | None,
        info: DataInfo,
        images: tuple[ImageSet, ImageSet],
    ) -> None:
        self._choices = choices
        self._method = method
        self._images, self._held_out = images
        torch.manual_seed(choices.seed)
        model = build_vit(choices, info.classes)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        repeat_passes(model, times)
        self.plugin = HeteroZeroPlugin(
            stage=choices.stage if choices.stage == "auto" else int(choices.stage),
            global_batch_size=choices.global_batch,
            precision=choices.precision,
            method=method,
            profile=profile,
        )
        loader = self.plugin.prepare_dataloader(
            self._images, shuffle=True, seed=choices.seed, drop_last=True, collate_fn=_collate
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=choices.lr, weight_decay=WEIGHT_DECAY)
        self.iterations = loader.global_batches * choices.epochs  # type: ignore[attr-defined]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(rise_and_fall, total=self.iterations))
        self._booster = Booster(plugin=self.plugin)
        start = time.perf_counter()
        try:
            self._model, self._optimizer, self._criterion, self._loader, self._schedule = self._booster.boost(
                model, optimizer, criterion=_loss, dataloader=loader, lr_scheduler=schedule
            )
        except ValueError as error:
            # Every rank raises the same: a profile of something else, or no memory for a sample.
            raise UsageError(str(error)) from None
        self._boost_seconds = time.perf_counter() - start
        self.stage = int(self.plugin.stage)
        self.device = get_accelerator().get_current_device()

    def train(self, display: Display) -> Training:
        """Train for all epochs; what came of it, the same on all ranks but for the times."""
        training = Training(self._method, self.stage, self._boost_seconds)
        display.begin(training, self.iterations)
        for epoch in range(self._choices.epochs):
            training.allocations.append(self.plugin.allocation)
            losses = torch.zeros(self._loader.global_batches, device=self.device)
            last = time.perf_counter()
            for micro_batch, loss in self._train_epoch(epoch):
                losses[micro_batch.global_batch] += loss * micro_batch.samples / micro_batch.global_samples
                if micro_batch.is_last:
                    get_accelerator().synchronize()
                    now = time.perf_counter()
                    training.seconds.append(now - last)
                    last = now
                    display.iteration(training.seconds[-1])
            dist.all_reduce(losses)
            training.loss.extend(losses.tolist())
            training.accuracy.append(self._evaluate())
            display.epoch(epoch, training)
        balancer = self.plugin.batch_balancer
        assert balancer is not None
        training.reallocations = balancer.reallocations
        training.peak_memory_bytes = _gather(int(get_accelerator().max_memory_allocated()))
        return training

    def _train_epoch(self, epoch: int) -> Iterator[tuple[Any, Tensor]]:
        """The loop of any training script; yields each micro-batch with its mean loss on this rank."""
        self._model.train()
        self._loader.set_epoch(epoch)
        self._images.set_epoch(epoch)
        for images, labels in self._loader:
            loss = self._criterion(self._model(images.to(self.device)), labels.to(self.device))
            self._booster.backward(loss, self._optimizer)
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
            yield self._loader.current, loss.detach().float()

    @torch.no_grad()
    def _evaluate(self) -> float:
        """The share of held-out images that are recognized. Collective over all ranks."""
        self._model.eval()
        correct = torch.zeros((), device=self.device)
        for images, labels in padded_batches(self._held_out, 32, dist.get_rank(), dist.get_world_size()):
            logits = self._model(images.to(self.device))
            correct += (logits.argmax(1) == labels.to(self.device)).sum()
        dist.all_reduce(correct)
        return float(correct) / len(self._held_out)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.float(), labels)


def _gather(value: int) -> list[int]:
    values = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _collate(batch: Any) -> Any:
    """The data set hands out whole batches; measuring takes single images."""
    return default_collate(batch) if isinstance(batch, list) else batch
