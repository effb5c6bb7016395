"""Weights of batches in the mean over their global batch, by the kind of mean of the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from ..colossalai_support.accelerator import get_accelerator
from ..common.ranks import on_every_rank
from ..profiling.aborted_step import find_zero_optimizer
from ..profiling.loss_mean import COMPARED, IGNORED, check_samples, ignored_labels, labels_of
from ..profiling.training_step import TrialRun, with_dicts
from .progress import MicroBatch


def weight_function(weight_by: str | Callable[[Any], Any]) -> Callable[[Any], Any] | None:
    """Function that counts a batch; None if samples are counted."""
    if callable(weight_by) or weight_by == "samples":
        return weight_by if callable(weight_by) else None
    return functools.partial(_tokens, is_next=weight_by == "next_tokens")


def _tokens(batch: Any, is_next: bool) -> int:
    """Number of labels that are not ``IGNORED``; of next tokens without the first, for which there is no prediction."""
    labels = labels_of(batch)
    if labels is None:
        raise TypeError(
            'weight_by="tokens" and "next_tokens" need integer labels: in a mapping under the key labels, or as the '
            "second part of a pair; for other batches give a function of the batch"
        )
    if is_next and labels.dim() != 2:
        raise TypeError(f'weight_by="next_tokens" needs labels [samples, tokens], not {list(labels.shape)}')
    return int(((labels[:, 1:] if is_next else labels) != IGNORED).sum())


def require_mean_over_samples(trial: TrialRun, precision: str) -> None:
    """Raise ``ValueError`` unless losses show that the user's loss is the mean over samples. Every rank calls it."""
    why = check_samples(trial, precision)
    if why is None:
        return
    choices = (
        'give weight_by="tokens" if the loss is the mean over labels that are not -100, "next_tokens" if it leaves out '
        "the first label of each sequence too (causal language models of transformers), or a function of a batch that "
        'returns what its loss was divided by, such as lambda batch: batch["mask"].sum() or, with weights of classes, '
        "lambda batch: criterion.weight[batch[1]].sum()"
    )
    if why:
        raise ValueError(
            f"what the loss is a mean over cannot be found out by comparing losses ({why}), but micro-batches of "
            f'different sizes need the right weights: give weight_by="samples" if it is one over samples; {choices}'
        )
    raise ValueError(
        "the loss of two samples together is not the mean of their losses, so micro-batches of different sizes need "
        f"weights that the plugin does not know: {choices}. If the loss compares the samples of a batch with each "
        'other, it depends on how they are divided; weight_by="samples" trains all the same'
    )


def refuse_ignored(criterion: Any) -> Callable[[Any], None]:
    """Check that refuses labels that the loss may leave out, if no compared sample had any. Segmentation maps
    ``[samples, height, width]`` often have 255 for pixels without a class."""
    ignored = ignored_labels(criterion)

    def check(batch: Any) -> None:
        labels = labels_of(batch)
        if labels is None:
            return
        for value in (*ignored, 255) if labels.dim() > 2 else ignored:
            if bool((labels == value).any()):
                raise RuntimeError(
                    f"a batch has labels of {value}, which the samples that were compared before training did not "
                    "have, so losses are weighted by samples; if the loss is a mean over the other labels, give "
                    'weight_by="tokens" or "next_tokens" (causal language models) for -100, or a function such as '
                    f'lambda batch: (batch["labels"] != {value}).sum(), otherwise weight_by="samples"'
                )

    return check


def samples_in(trial: TrialRun) -> Callable[[Any], float] | None:
    """A function that counts the samples of a batch, fewer than planned if ``collate_fn`` leaves some out; None if none
    can. It uses the first tensor whose first size grows with the number of samples and is the same for all samples, so
    packed tokens are not taken for samples. Every rank calls it, and takes what the first rank finds."""
    if trial.loader.collate_fn is default_collate:
        return None
    found = on_every_rank(lambda: _counted_tensor(trial), "counting the samples of a batch")[0]
    if found is None:
        return None
    place, per_sample = found

    def count(batch: Any) -> float:
        sizes = _sizes(batch)
        return (sizes[place] if len(sizes) > place else 0) / per_sample

    return count


def _counted_tensor(trial: TrialRun) -> tuple[int, float] | None:
    """Number of the tensor by which samples are counted, and its first size for one sample."""
    once, twice = (_sizes(trial.batch([trial.first] * trial.at_once * times)) for times in (1, 2))
    others = []
    loader: Any = trial.loader
    for index in loader.some_samples(COMPARED, 0):
        with suppress(Exception):  # collate_fn may leave it out
            others.append(_sizes(trial.batch([index] * trial.at_once)))
    if any(len(sizes) != len(once) for sizes in (twice, *others)):
        return None
    for place, (one, two) in enumerate(zip(once, twice, strict=True)):
        if 0 < 2 * one == two and all(sizes[place] in (0, one) for sizes in others):
            return place, one / trial.at_once
    return None


def _sizes(batch: Any) -> list[int]:
    leaves = tree_leaves(with_dicts(batch))
    return [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]


class SampleTotal:
    """Weights of losses in the global batch, by samples."""

    is_estimated = False

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def weighted(self, loss: Tensor, micro_batch: MicroBatch) -> Tensor:
        """``loss``, the mean over a micro-batch, times its weight."""
        return loss * (micro_batch.samples * self._ranks / micro_batch.global_samples)

    def correct(self, optimizer: Any) -> None:
        """Correct the gradients before the step of a global batch, if the weights were estimated."""

    def forget(self) -> None:
        """Forget the gradients so far, which were dropped."""


class CountedTotal(SampleTotal):
    """Weights by counts of each batch, such as tokens. If every rank has one micro-batch in a global batch, counts are
    summed before the backward pass. Otherwise all ranks use the same estimate, and correct gradients at the step."""

    def __init__(self, ranks: int, model: nn.Module, *, equal_steps: bool) -> None:
        super().__init__(ranks)
        self._model = model
        self._equal_steps = equal_steps
        self._per_sample: float | None = None  # estimate; None before the first global batch
        self._divisor = 1.0
        self._uncorrected = 0.0  # sum of this rank's counts in an incomplete global batch
        self.is_estimated = False
        self._samples = 1
        self._latest: MicroBatch | None = None
        self._corrected: MicroBatch | None = None

    def weighted(self, loss: Tensor, micro_batch: MicroBatch) -> Tensor:
        assert micro_batch.weight is not None
        if micro_batch is self._corrected:
            raise RuntimeError(
                "there is a backward pass of a global batch whose gradients were clipped already; clip them after the "
                "last backward pass"
            )
        if micro_batch is not self._latest:
            self._count(micro_batch, micro_batch.weight)
        if micro_batch.weight == 0:
            # The mean over nothing is not a number, and neither is its product with zero.
            return loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        return loss * (micro_batch.weight * self._ranks / self._divisor)

    def correct(self, optimizer: Any) -> None:
        if not self.is_estimated:
            return
        (total,) = self._sum_over_replicas(self._uncorrected)
        if total > 0:
            for gradient in _gradients(self._model, optimizer) if total != self._divisor else ():
                gradient.mul_(self._divisor / total)
            self._per_sample = total / self._samples
        latest = self._latest
        self.forget()
        self._corrected = latest

    def forget(self) -> None:
        self._uncorrected, self.is_estimated, self._latest, self._corrected = 0.0, False, None, None

    def _count(self, micro_batch: MicroBatch, weight: float) -> None:
        self._latest = micro_batch
        if self._equal_steps and micro_batch.step == 0 and micro_batch.is_last:
            (total,) = self._sum_over_replicas(weight)
            self._divisor = total or 1.0
            return
        if micro_batch.step == 0:
            if self.is_estimated:
                raise RuntimeError(
                    "the gradients of several global batches are accumulated, but the sum of weights (weight_by) of "
                    "each is known only after its last micro-batch; step after every global batch, or make "
                    "global_batch_size small enough for one micro-batch per rank"
                )
            if self._per_sample is None:
                total, samples = self._sum_over_replicas(weight, micro_batch.samples)
                self._per_sample = total / samples if total > 0 else 1.0
            self._divisor = self._per_sample * micro_batch.global_samples
            self.is_estimated, self._samples = True, micro_batch.global_samples
        self._uncorrected += weight

    def _sum_over_replicas(self, *values: float) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64, device=get_accelerator().get_current_device())
        dist.all_reduce(sums)
        return (sums * self._ranks / dist.get_world_size()).tolist()


def _gradients(model: nn.Module, optimizer: Any) -> Iterator[Tensor]:
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield parameter.grad
    zero = find_zero_optimizer(optimizer)
    for store in () if zero is None else zero.pg_to_grad_store.values():
        for slices in store._grads_of_params.values():
            for parts in slices.values():
                yield from parts
