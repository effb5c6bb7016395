"""Add uneven batches to a model, optimizer and loader that a plugin has configured: measure, divide, accumulate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ..colossalai_support.accelerator import get_accelerator
from ..common.ranks import on_every_rank, print_on_rank_0
from ..planner.batches.batch_profile import BatchProfile
from ..profiling.loss_check import check_loss
from ..profiling.preserved_state import inner_optimizer, preserved_state
from ..profiling.rank_profiler import ModelDescription, changes, profile_ranks, speed_now
from ..profiling.training_step import TrialRun
from .accumulation import GradientAccumulation
from .batch_balancer import BatchBalancer, divider_of
from .busy_timer import BusyTimer, ForwardOnlyTimer, forward_curve
from .config import BatchConfig
from .loader import HeteroDataLoader
from .loss_weights import (
    WORDS,
    CountedTotal,
    SampleTotal,
    found_weight,
    refuse_ignored,
    samples_in,
    weight_function,
)
from .out_of_memory import OutOfMemoryGuard
from .saved_profile import CachedProfile, ProfileFile, context_of
from .sync_batch_norm import SampleWeightedBatchNorm


@dataclass(frozen=True)
class BatchSetup:
    config: BatchConfig
    stage: int
    precision: str
    replica_of: Sequence[int]
    """Index of the model replica of each rank, by rank."""
    synchronize: Callable[[bool], None]
    """Called before a forward pass; True: its gradients are to be summed over replicas."""
    leaves: Sequence[Tensor] = ()
    """The tensors that backward passes add gradients to; (): the model's parameters."""
    max_norm: float = 0.0
    """Norm that gradients are clipped to before the step; 0: no clipping, or the optimizer does it."""


def trial_run(
    setup: BatchSetup, model: ModelWrapper, optimizer: OptimizerWrapper, criterion: Any, loader: HeteroDataLoader
) -> TrialRun:
    return TrialRun(model, optimizer, criterion, setup.config.training_step, loader)


def profile_for(
    setup: BatchSetup,
    description: ModelDescription,
    trial: TrialRun,
) -> tuple[BatchProfile, Path | None]:
    """Profile of the user's file, an earlier run or a new one, and its path, if kept. Every rank calls it. The user's
    loss is checked first in any case."""
    config, loader = setup.config, trial.loader
    assert isinstance(loader, HeteroDataLoader)
    if config.accumulation == "per_rank" and any(
        isinstance(module, nn.SyncBatchNorm) for module in trial.model.modules()
    ):
        raise ValueError(
            'with accumulation="per_rank" the ranks run different numbers of micro-batches, but SyncBatchNorm (stage 0 '
            'converts BatchNorm to it) waits for all ranks in each micro-batch; use accumulation="shared"'
        )
    cap = min(config.global_batch_size, config.max_micro_batch or config.global_batch_size)
    file, cached = None, None
    if config.profile is not None:
        file = ProfileFile(config.profile)
        profile = file.read(setup.replica_of, description, setup.stage, setup.precision, cap)
        if profile is None:
            file.check_writable()
    loader.set_multiple(check_loss(trial, setup.replica_of, config.multiple_of))
    if loader.multiple_of > 1:
        print_on_rank_0(f"all batch sizes are multiples of {loader.multiple_of} samples")
    if cap < loader.multiple_of:
        raise ValueError(
            f"batch sizes must be multiples of {loader.multiple_of} samples, but max_micro_batch={cap}; allow more"
        )
    if file is None:
        cached = _cached_profile(setup, description, trial, cap)
        profile = _still_right(setup, cached, trial)
    if profile is None:
        profile = profile_ranks(
            trial,
            description,
            stage=setup.stage,
            precision=setup.precision,
            cap=cap,
            synchronize=setup.synchronize,
            replica_of=setup.replica_of,
            multiple_of=loader.multiple_of,
        )
        for place in (file, cached):
            if place is not None:
                place.write(profile)
    smallest = max(kind.min_batch for kind in profile.kinds)
    if cap < smallest:
        raise ValueError(
            f"the model trains with micro-batches of at least {smallest} samples, but max_micro_batch={cap}; allow more"
        )
    return profile, cached.path if cached is not None else Path(config.profile) if config.profile is not None else None


def _cached_profile(setup: BatchSetup, description: ModelDescription, trial: TrialRun, cap: int) -> CachedProfile:
    step, criterion, optimizer = setup.config.training_step, trial.criterion, inner_optimizer(trial.optimizer)
    with preserved_state(trial.model, trial.optimizer):
        samples = trial.batch([trial.first] * trial.loader.multiple_of)  # type: ignore[attr-defined]
    context = context_of(
        trial.model,
        optimizer,
        samples,
        description,
        stage=setup.stage,
        precision=setup.precision,
        cap=cap,
        replica_of=list(setup.replica_of),
        multiple_of=trial.loader.multiple_of,  # type: ignore[attr-defined]
        training_step=f"{step.__module__}.{getattr(step, '__qualname__', type(step).__qualname__)}",
        criterion=criterion if criterion is None else getattr(criterion, "__qualname__", repr(criterion)),
    )
    return CachedProfile(setup.config.profile_cache, context)


def _still_right(setup: BatchSetup, cached: CachedProfile, trial: TrialRun) -> BatchProfile | None:
    """The profile of an earlier run, if every rank's memory and speed are still the same. Every rank calls it."""
    profile = cached.read()
    if profile is None:
        return None
    device = profile.kinds[profile.ranks[setup.replica_of[dist.get_rank()]]]
    ranks = on_every_rank(
        lambda: speed_now(device, trial, setup.synchronize, setup.stage), "checking an earlier profile"
    )
    changed = changes(ranks, setup.replica_of)
    if changed is not None:
        print_on_rank_0(f"the profile of an earlier run is not right any more ({changed}); measuring again")
        return None
    print_on_rank_0(f"memory and speed of each device are those of an earlier run ({cached.path})")
    return profile


def attach_batches(
    setup: BatchSetup,
    profile: BatchProfile,
    trial: TrialRun,
    lr_scheduler: LRScheduler | None,
    profile_path: Path | None = None,
) -> tuple[BatchBalancer, GradientAccumulation]:
    """Divide the loader's batches, and replace the methods that the training loop calls by ones for uneven batches. The
    profile at ``profile_path`` is changed if a rank runs out of memory."""
    model, optimizer, loader = trial.model, trial.optimizer, trial.loader
    assert isinstance(model, ModelWrapper) and isinstance(loader, HeteroDataLoader)
    weight_by, total = _total_weight(setup, model, trial)
    multiple = loader.multiple_of
    loader.set_placeholders(max(-(-kind.min_batch // multiple) * multiple for kind in profile.kinds))
    timer = _timer(setup, profile, model, optimizer, loader)
    balancer = BatchBalancer(setup.config, profile, setup.stage, loader, timer, setup.replica_of)
    accumulation = GradientAccumulation(
        loader,
        setup.synchronize,
        total,
        weight_by=weight_by,
        stage=setup.stage,
        is_scaled=setup.precision == "fp16",
        leaves=setup.leaves,
        max_norm=setup.max_norm,
        on_step=balancer.on_step,
    )
    accumulation.attach(model, optimizer, lr_scheduler)
    replica = setup.replica_of[dist.get_rank()]
    communicates = (
        setup.stage == 3
        or list(setup.replica_of).count(replica) > 1
        or any(isinstance(module, nn.SyncBatchNorm | SampleWeightedBatchNorm) for module in model.modules())
    )
    OutOfMemoryGuard(loader, replica, profile_path, may_repeat=not communicates).attach(model, optimizer)
    return balancer, accumulation


def _total_weight(setup: BatchSetup, model: ModelWrapper, trial: TrialRun) -> tuple[Any, SampleTotal]:
    """Kind of mean of losses, as the user wants or as found, and its weights, of which the trial's loader is told."""
    loader: Any = trial.loader
    weight_by = setup.config.weight_by
    if weight_by is None:
        weight_by = found_weight(trial, setup.precision)
        print_on_rank_0(f"losses are weighted {WORDS[weight_by]}")
        if weight_by == "samples":
            loader.check = refuse_ignored(trial.criterion)
    replicas = max(setup.replica_of) + 1
    weight_of = samples_in(trial) if weight_by == "samples" else weight_function(weight_by)
    if weight_of is None:
        return weight_by, SampleTotal(replicas)
    loader.weigh_by(weight_of, by_samples=weight_by == "samples")
    return weight_by, CountedTotal(replicas, model, equal_steps=setup.config.accumulation == "shared")


def _timer(
    setup: BatchSetup,
    profile: BatchProfile,
    model: ModelWrapper,
    optimizer: OptimizerWrapper,
    loader: HeteroDataLoader,
) -> BusyTimer | ForwardOnlyTimer:
    """Timer of this rank's global batches, attached before accumulation, so that it sees the optimizer's steps only."""
    if setup.stage == 3 and get_accelerator().name != "cpu":
        replica = setup.replica_of[dist.get_rank()]
        whole = divider_of(setup.config, profile, setup.stage, loader.multiple_of).curves[replica]
        forward = forward_curve(profile.kinds[profile.ranks[replica]], whole.max_batch)
        if forward is not None:
            return ForwardOnlyTimer(
                model, lambda: 1 if loader.current is None else max(1, loader.current.samples), whole, forward
            )
    timer = BusyTimer(setup.replica_of)
    timer.attach(optimizer)
    loader.load_timer = timer
    return timer
