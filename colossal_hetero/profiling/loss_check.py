"""Check, before training, that the loss is a finite mean over the samples of a batch. Only a mean is right with the
weights of micro-batches (accumulation.py). The loss of one sample is compared with that of a batch that holds it twice:
a mean stays the same, a sum doubles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from ..colossalai_support.accelerator import is_out_of_memory
from ..common.ranks import on_every_rank
from .aborted_step import abort_step
from .local_collectives import local_collectives
from .memory import recover
from .preserved_state import preserved_state
from .training_step import TrialRun

LossKind = Literal["mean", "sum", "not finite", "unknown"]
"""``unknown``: neither a mean nor a sum, or too random to tell."""
Mode = Literal["evaluation", "training"]
Losses = tuple[tuple[float, float], float]
"""Two losses of one sample, and the loss of a batch that holds it twice."""
MODES: tuple[Mode, ...] = ("evaluation", "training")
MOST_AT_ONCE = 4  # samples at once that are tried at most, if a loss cannot be computed of one: pairs, triplets.
SAMPLES = 4  # samples that are tried if the loss of one is not finite, for example because all its labels are ignored
TOLERANCE = 0.02
"""Largest relative difference between losses that count as equal; a loss in bfloat16 has a precision of 0.4 %."""
MAX_NOISE = 0.2
"""Largest share by which the loss of one batch may vary, for example by dropout; above it, its kind is unknown."""


def kind_of_loss(one: Sequence[float], twice: float) -> LossKind:
    """Kind of a batch's loss, from losses of one sample and of a batch that holds it twice."""
    if not all(map(math.isfinite, (*one, twice))):
        return "not finite"
    middle = sum(one) / len(one)
    noise = max(one) - min(one)
    if noise > MAX_NOISE * abs(middle):
        return "unknown"
    tolerance = TOLERANCE * abs(middle) + 1.5 * noise
    if abs(twice - middle) <= tolerance:
        return "mean"
    return "sum" if abs(twice - 2 * middle) <= tolerance else "unknown"


def check_loss(trial: TrialRun, replica_of: Sequence[int], multiple_of: int | None = None) -> int:
    """Check the loss that ``trial`` computes, on the first samples of the dataset; nothing is changed. Every rank calls
    it. A loss that is neither mean nor sum is accepted, since a few samples do not tell its kind. If two samples do not
    fit into memory, nothing is checked. Returns the number that all batch sizes must be multiples of."""
    tried = on_every_rank(lambda: _first_try(trial, multiple_of), "checking the loss")
    trial.at_once, multiple = max(each.at_once for each in tried), max(each.multiple for each in tried)
    found = [each.losses for each in tried if each.losses is not None]
    if len(found) < len(tried):
        return multiple
    trial.first = max(each.first for each in tried)
    mode: Mode = "evaluation" if all(each.mode == "evaluation" for each in tried) else "training"
    if any(kind_of_loss(one, twice) == "not finite" for one, twice in found):
        # Without communication, sharded parameters are not those of the model, and their loss may be not finite by
        # chance. The passes above have succeeded on all ranks, so that no rank waits for another one now.
        found = on_every_rank(lambda: _losses(trial, mode, trial.at_once, communicate=True)[1], "checking the loss")
    for rank, (one, twice) in enumerate(found):
        kind = kind_of_loss(one, twice)
        if kind == "sum":
            raise ValueError(
                f"rank {rank}: the loss is a sum over the samples (it is {one[0]:.6g} for a sample, and {twice:.6g} if "
                "the batch holds this sample twice), but micro-batches of different sizes need the mean. Use "
                'reduction="mean" or divide the loss by the number of samples, also in training_step if you gave one'
            )
        if kind == "not finite":
            raise ValueError(
                f"rank {rank}: the loss of each of the first samples is not a finite number (it is {one[0]:g} for the "
                "last one that was tried). Check inputs, labels (a mean over no label is nan) and the model's "
                "weights, or give a training_step that computes the loss as your loop does"
            )
    asked = on_every_rank(lambda: _asks_other_ranks(trial, mode, replica_of), "checking the loss")
    if any(asked):
        raise ValueError(
            f"the loss depends on a value that {next(filter(None, asked))} combines over ranks, such as a count of "
            "boxes or tokens in the batches of all ranks. Micro-batches differ in number and size between ranks, so "
            "the plugin sums the counts: compute the loss as a mean over its own batch, and give weight_by, a function "
            "of a batch that returns what this mean was divided by"
        )
    return multiple


class _Tried(NamedTuple):
    mode: Mode
    at_once: int
    multiple: int
    first: int
    losses: Losses | None  # None if there is not enough memory


def _first_try(trial: TrialRun, multiple_of: int | None) -> _Tried:
    """The losses in the first mode and of the first number of samples at once with which the step computes one."""
    failure: Exception | None = None
    for at_once in range(1, MOST_AT_ONCE + 1) if multiple_of is None else [multiple_of]:
        # Evaluation mode is best, because it switches all randomness off; some models compute no loss in it.
        for mode in MODES:
            try:
                first, losses = _losses(trial, mode, at_once)
                # Otherwise the loss only needs more than one sample.
                is_multiple = multiple_of is not None or at_once == 1 or not _runs(trial, mode, at_once + 1)
                return _Tried(mode, at_once, at_once if is_multiple else 1, first, losses)
            except Exception as error:
                if is_out_of_memory(error):
                    recover(error)
                    return _Tried("training", at_once, multiple_of or 1, 0, None)
                if at_once == 1 or multiple_of is not None:
                    failure = error
    assert failure is not None
    raise failure


def _runs(trial: TrialRun, mode: Mode, samples: int) -> bool:
    with suppress(Exception):
        _losses(trial, mode, samples)
        return True
    return False


def _losses(trial: TrialRun, mode: Mode, at_once: int, communicate: bool = False) -> tuple[int, Losses]:
    """Losses of one sample, computed twice, and of a batch that holds it twice; with the number of the sample, the
    first one with a finite loss or the last that is tried."""
    failure: Exception | None = None
    found: tuple[int, Losses] | None = None
    with preserved_state(trial.model, trial.optimizer), uncompiled(trial.model):
        set_mode(trial.model, mode)
        for index in range(SAMPLES):
            try:
                with nullcontext() if communicate else local_collectives(trial.model):
                    found = index, _of_sample(trial, [index] * at_once)
            except Exception as error:
                # collate_fn may leave a sample out. While ranks communicate, all of them must try the same.
                if communicate or is_out_of_memory(error):
                    raise
                failure = failure or error
                continue
            if kind_of_loss(*found[1]) != "not finite":
                break
    if found is None:
        assert failure is not None
        raise failure
    return found


def _of_sample(trial: TrialRun, once: list[int]) -> Losses:
    try:
        first, again, twice = (_number(trial.loss(indices)) for indices in (once, once, once * 2))
    except Exception:
        abort_step(trial.model, trial.optimizer)
        raise
    return (first, again), twice


def _asks_other_ranks(trial: TrialRun, mode: Mode, replica_of: Sequence[int]) -> str | None:
    """Collective over several replicas on whose result the loss depends; None if there is none. The loss is computed
    again with doubled results; collectives inside the model belong to the plugin, but not sums over replicas."""
    called: list[str] = []
    inside: list[None] = []

    def counts(name: str, group: Any) -> bool:
        ranks = dist.get_process_group_ranks(group or dist.distributed_c10d._get_default_group())
        if len({replica_of[rank] for rank in ranks}) < 2 or (inside and name != "all_reduce"):
            return False
        called.append(name)
        return True

    handles = [
        trial.model.register_forward_pre_hook(lambda *_: inside.append(None)),
        trial.model.register_forward_hook(lambda *_: inside.pop(), always_call=True),
    ]
    try:
        with preserved_state(trial.model, trial.optimizer), uncompiled(trial.model):
            set_mode(trial.model, mode)
            once = [trial.first] * trial.at_once
            with local_collectives(trial.model, doubled=counts):
                doubled = _number(trial.loss(once))
            if not called:
                return None
            with local_collectives(trial.model):
                usual = [_number(trial.loss(once)) for _ in range(2)]
    finally:
        for handle in handles:
            handle.remove()
    # Sharded parameters are not those of the model here, so that a loss may be not finite by chance.
    changed = abs(doubled - usual[0]) > 2 * abs(usual[0] - usual[1]) + 1e-6 * abs(usual[0])
    return called[0] if (changed or math.isfinite(usual[0]) > math.isfinite(doubled)) else None


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """In the block, compiled modules run as written: compiling them for evaluation would take long."""
    modules: list[Any] = list(model.modules())
    with ExitStack() as stack:
        for module in modules:
            if hasattr(module, "_orig_mod"):
                stack.callback(setattr, module, "forward", module.forward)
                module.forward = module._orig_mod.__call__
            if module._compiled_call_impl is not None:
                stack.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
                module._compiled_call_impl = None
        yield


def set_mode(model: nn.Module, mode: Mode) -> None:
    """Set evaluation mode, or training mode without dropout and with the running statistics of normalization."""
    model.train(mode == "training")
    for module in model.modules():
        if isinstance(module, (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)):
            module.eval()


def _number(loss: object) -> float:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"the training step returned {what} instead of a scalar tensor, the mean loss over the batch")
    return float(loss)
