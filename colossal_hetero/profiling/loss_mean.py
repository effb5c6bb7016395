"""Check, before training, that a loss is the mean over the samples of a batch. Losses of unequal micro-batches get
their weights by samples then (accumulation.py); that it is a mean at all is checked in loss_check.py.

[Note: evidence] Let a and b be the losses of two samples alone, and L that of the batch of both. In a mean in which
they count w_a and w_b, ``L = s·a + (1 − s)·b`` with ``s = w_a / (w_a + w_b)``, and in a mean over samples s is a half.
Of samples from the whole dataset, those whose labels differ most are compared. Parameters are changed at random
meanwhile: a new model may give all samples the same loss, or equal parts of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..colossalai_support.accelerator import is_out_of_memory
from ..common.ranks import on_every_rank
from .aborted_step import abort_step
from .local_collectives import local_collectives
from .loss_check import MODES, Mode, set_mode, uncompiled
from .memory import recover
from .preserved_state import preserved_state
from .training_step import TrialRun, with_dicts

IGNORED = -100  # label that torch's losses leave out by default
DRAWN = 32  # samples drawn per rank
COMPARED = 8  # samples compared per rank
SCALES = (1.0, 0.1, 0.0)
"""Sizes of the random change of the parameters, relative to them; the next is used if the losses show nothing."""
CHANGED = 2**20  # largest number of elements of a parameter that are changed
NOISE = 1e-3  # if the loss of a batch varies by more than this share, it is random
ROUNDING = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 4e-3}  # relative error of a loss, by precision of the training
MAX_ERROR = 0.05  # pairs whose share is less certain than this show nothing
TOLERANCE = 0.02
"""Difference of shares that counts as equal, in addition to their error: weights differ by less than 9 %."""
SAME = 0.02  # largest relative difference between losses of a sample alone and twice that count as equal


class Pair(NamedTuple):
    """Two samples; see [Note: evidence]."""

    share: float  # measured part of the first one in the mean of both; nan if no weights explain the loss of both
    error: float


@dataclass(frozen=True)
class Evidence:
    pairs: tuple[Pair, ...] = ()
    leaves_out: bool = False  # True if the loss may leave labels out that were seen, or weighs classes
    is_random: bool = False


def why_not_samples(found: Sequence[Evidence]) -> str | None:
    """Reason why the loss is not known to be the mean over samples; "" if it is another mean; None if it is known."""
    if any(each.is_random for each in found):
        return "the loss of the same batch differs from pass to pass"
    pairs = [pair for each in found for pair in each.pairs if not pair.error > MAX_ERROR]
    if not pairs:
        return "no samples could be compared, or all of them have the same loss"
    if not all(abs(pair.share - 0.5) <= pair.error + TOLERANCE for pair in pairs):
        return ""
    if any(each.leaves_out for each in found):
        return "they agree with a mean over samples, but the loss may leave labels out, or weigh classes"
    return None


def labels_of(batch: Any) -> Tensor | None:
    """Integer labels ``[samples, …]``: under ``labels``, ``label``, ``targets`` or ``target``, or second of a pair."""
    labels = None
    if isinstance(batch, Mapping):
        labels = next((batch[key] for key in ("labels", "label", "targets", "target") if key in batch), None)
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        labels = batch[1]
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return None
    return labels


def ignored_labels(criterion: Any) -> tuple[int, ...]:
    """The labels that a loss may leave out: -100, and what modules of ``criterion`` have as ``ignore_index``."""
    modules = criterion.modules() if isinstance(criterion, nn.Module) else ()
    own = [getattr(module, "ignore_index", None) for module in modules]
    return tuple(dict.fromkeys((IGNORED, *(each for each in own if isinstance(each, int)))))


def weighs_classes(criterion: Any) -> bool:
    """True if ``criterion`` divides by the sum of the weights of classes, and they are not all equal."""
    return any(
        isinstance(module, nn.CrossEntropyLoss | nn.NLLLoss)
        and module.weight is not None
        and not bool((module.weight == module.weight[0]).all())
        for module in (criterion.modules() if isinstance(criterion, nn.Module) else ())
    )


def check_samples(trial: TrialRun, precision: str) -> str | None:
    """Compare the losses that ``trial`` computes of samples alone and in pairs; see :func:`why_not_samples`. Every rank
    calls it, and gets the same answer. Nothing is trained, the model does not communicate, and its parameters and all
    other state are restored."""
    if len(trial.loader.dataset) < 2:  # type: ignore[arg-type]
        return None
    compare = _Comparison(trial, ROUNDING[precision]).evidence
    return why_not_samples(on_every_rank(compare, "finding out what the loss is a mean over"))


class _Comparison:
    def __init__(self, trial: TrialRun, rounding: float) -> None:
        self._trial, self._rounding, self._multiple = trial, rounding, trial.at_once
        self._batches: dict[int, Any] = {}
        self._is_random_batch = False

    def evidence(self) -> Evidence:
        trial = self._trial
        usable = {index: batch for index in trial.drawn(DRAWN) if (batch := self._alone(index)) is not None}
        if len(usable) < 2:
            return Evidence()
        chosen = [list(usable)[number] for number in _spread(_features(list(usable.values())), COMPARED)]
        self._batches = {index: usable[index] for index in chosen}
        again = trial.batch([chosen[0]] * self._multiple)
        self._is_random_batch = not _equal(again, self._batches[chosen[0]])
        with preserved_state(trial.model, trial.optimizer), uncompiled(trial.model), local_collectives(trial.model):
            for mode in MODES:
                try:
                    return self._compared(mode)
                except Exception as error:
                    abort_step(trial.model, trial.optimizer)
                    if is_out_of_memory(error):
                        recover(error)
                        return Evidence()
                    if mode == MODES[-1]:
                        raise
            raise AssertionError("each mode returns or raises")

    def _alone(self, index: int) -> Any:
        with suppress(Exception):
            return self._trial.batch([index] * self._multiple)
        return None

    def _compared(self, mode: Mode) -> Evidence:
        set_mode(self._trial.model, mode)
        pairs: list[Pair] = []
        for scale in SCALES:
            with changed_parameters(self._trial.model, scale):
                first = next(iter(self._batches))
                one, again = self._loss(first), self._loss(first)
                if not math.isclose(one, again, rel_tol=NOISE) and math.isfinite(one):
                    return Evidence(is_random=True)
                pairs = self._pairs()
                if sum(pair.error <= MAX_ERROR for pair in pairs) >= max(len(pairs) // 2, 1):
                    break
        return Evidence(tuple(pairs), self._leaves_out())

    def _loss(self, *indices: int) -> float:
        return float(self._trial.loss_of(copy(self._batch(*indices))))

    def _batch(self, *indices: int) -> Any:
        if len(indices) == 1:
            return self._batches[indices[0]]
        if self._is_random_batch:
            batches = (with_dicts(self._batches[index]) for index in indices)
            return tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *batches)
        # Augmentations that mix a batch with its reverse (Mixup) mix each sample with itself in this order.
        half = self._multiple // 2
        ends = [indices[0]] * half, [indices[0]] * (self._multiple - half)
        return self._trial.batch([*ends[0], *[indices[1]] * self._multiple, *ends[1]])

    def _pairs(self) -> list[Pair]:
        chosen = list(self._batches)
        alone = [self._loss(index) for index in chosen]
        twice = [(one, self._loss(index, index)) for index, one in zip(chosen[:2], alone, strict=False)]
        if any(abs(two - one) > SAME * abs(one) for one, two in twice):
            # No mean gives the same sample twice another loss.
            return [Pair(math.nan, 0.0)]
        noise = max((abs(two - one) for one, two in twice if math.isfinite(two - one)), default=0.0)
        return [
            _pair(alone[i], alone[j], self._loss(chosen[i], chosen[j]), noise, self._rounding)
            for i, j in pairwise(range(len(chosen)))
        ]

    def _leaves_out(self) -> bool:
        criterion = self._trial.criterion
        found = [labels for labels in map(labels_of, self._batches.values()) if labels is not None]
        ignored = ignored_labels(criterion)
        return weighs_classes(criterion) or any(torch.any(labels == value) for labels in found for value in ignored)


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(with_dicts(one)), tree_leaves(with_dicts(other)), strict=True)
    return all(not isinstance(a, Tensor) or (a.shape == b.shape and torch.equal(a, b)) for a, b in pairs)


def _pair(one: float, other: float, both: float, noise: float, rounding: float) -> Pair:
    finite = math.isfinite(one), math.isfinite(other)
    if finite == (True, True):
        error = noise + rounding * max(abs(one), abs(other), abs(both))
        if not abs(one - other) * MAX_ERROR > error:
            return Pair(math.nan, math.inf)
        return Pair((both - other) / (one - other), error / abs(one - other))
    if finite == (False, False):
        return Pair(math.nan, math.inf)
    # The mean over nothing is not a number: the sample counts nothing, if the loss of both is that of the other one.
    known = one if finite[0] else other
    return Pair(float(finite[0]) if math.isclose(both, known, rel_tol=SAME) else math.nan, 0.0)


def _features(batches: Sequence[Any]) -> np.ndarray:
    """Numbers by which the labels of samples differ, ``[samples, numbers]``: of each tensor its size and, of integers
    or truth values, how many elements are no usual padding, and their mean."""
    rows = []
    for batch in batches:
        row: list[float] = []
        for leaf in tree_leaves(with_dicts(batch)):
            if isinstance(leaf, Tensor) and leaf.numel():
                is_mask = leaf.is_floating_point() and bool(((leaf == 0) | (leaf == 1)).all())
                if leaf.is_floating_point() and not is_mask:
                    row += [float(leaf.numel()), 0.0, 0.0]
                else:
                    counted = (leaf != IGNORED) & (leaf != 255) & (leaf != 0)
                    row += [float(leaf.numel()), float(counted.sum()), float(leaf.double().mean())]
        rows.append(row)
    width = max(map(len, rows))
    return np.array([row + [0.0] * (width - len(row)) for row in rows])


def _spread(features: np.ndarray, count: int) -> list[int]:
    """Numbers of ``count`` rows that are far from each other: each next one is farthest from those before it."""
    rows = features / np.maximum(features.std(0), 1e-12) if features.size else np.zeros((len(features), 1))
    chosen = [0]
    while len(chosen) < min(count, len(rows)):
        distances = np.min([np.abs(rows - rows[each]).sum(1) for each in chosen], axis=0)
        distances[chosen] = -1.0
        chosen.append(int(np.argmax(distances)))
    return chosen


@contextmanager
def changed_parameters(model: nn.Module, scale: float) -> Iterator[None]:
    """In the block, parameters are changed at random by ``scale`` times their standard deviation, at least that of a
    usual initialization. They are restored bit for bit."""
    restores: list[Callable[[], Any]] = []
    try:
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters() if scale else ()):
                if parameter.is_floating_point() and parameter.numel():
                    part = parameter.detach()
                    if part.dim():
                        part = part[: max(CHANGED * len(part) // part.numel(), 1)]
                    restores.append(partial(part.copy_, part.to("cpu", copy=True)))
                    generator = torch.Generator().manual_seed(number)
                    size = max(
                        float(part.float().std(correction=0)), parameter.shape[-1] ** -0.5 if part.dim() else 1.0
                    )
                    part.add_(torch.randn(part.shape, generator=generator).to(part) * (scale * size))
        yield
    finally:
        with torch.no_grad():
            for restore in restores:
                restore()
