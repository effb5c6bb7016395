"""Add uneven batches to a model, optimizer and loader that a plugin has configured: measure, divide, accumulate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..accelerator import get_accelerator
from ..planner.batches.batch_profile import BatchProfile, load_profile, save_profile
from ..profiling.batches.device_profiler import device_name
from ..profiling.batches.rank_profiler import ModelDescription, profile_ranks
from ..profiling.training_step import TrialRun
from .accumulation import GradientAccumulation
from .batch_balancer import BatchBalancer, GlobalBatchTimer, divider_of
from .busy_timer import BusyTimer
from .config import BatchConfig
from .forward_only_timer import ForwardOnlyTimer, forward_curve
from .loader import HeteroDataLoader

__all__ = ["BatchSetup", "attach_batches", "profile_for"]


@dataclass(frozen=True)
class BatchSetup:
    """What uneven batches need to know about a plugin."""

    config: BatchConfig
    stage: int
    """Stage of ZeRO."""
    precision: str
    """``fp32``, ``fp16`` or ``bf16``."""
    replica_of: Sequence[int]
    """Index of the model replica that each rank belongs to, by rank."""
    synchronize: Callable[[bool], None]
    """Called before a forward pass with whether its gradients are to be summed over replicas."""
    max_norm: float = 0.0
    """Gradients are clipped to this norm before the step; 0 if there is no clipping or the optimizer does it."""


def _existing_profile(setup: BatchSetup, description: ModelDescription) -> BatchProfile | None:
    """The user's profile file, checked against devices and model; None if it does not exist yet. Every rank calls it.

    Raises:
        ValueError: on every rank, if the file is not a profile, or belongs to other devices or another model.
    """
    path = setup.config.profile
    found: list[Any] = [None] * dist.get_world_size()
    device = device_name(get_accelerator().get_current_device())
    dist.all_gather_object(found, (path is not None and Path(path).exists(), device))
    if path is None or not any(exists for exists, _ in found):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ValueError(
                f"profile={str(path)!r} cannot be written: {Path(path).absolute().parent} is not a directory"
            )
        return None
    missing = [rank for rank, (exists, _) in enumerate(found) if not exists]
    if missing:
        raise ValueError(f"profile={str(path)!r} does not exist on ranks {missing}; copy it to their machines")
    profile = load_profile(path)
    devices = [""] * (max(setup.replica_of) + 1)
    for (_, device), replica in zip(found, setup.replica_of, strict=True):
        devices[replica] = f"{devices[replica]} + {device}" if devices[replica] else device
    profile.check_fits(devices, description.digest, stage=setup.stage, precision=setup.precision)
    return profile


def profile_for(
    setup: BatchSetup,
    description: ModelDescription,
    model: ModelWrapper,
    optimizer: OptimizerWrapper,
    criterion: Callable | None,
    loader: HeteroDataLoader,
) -> BatchProfile:
    """The profile in the user's file, or a new one; a new one is written to that file.

    Raises:
        ValueError: the file is not a profile, or belongs to other devices or another model; or the model has layers
            with collectives, which would never end if the ranks ran different numbers of micro-batches.
        RuntimeError: measuring failed.
    """
    config = setup.config
    if config.accumulation == "per_rank" and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise ValueError(
            'with accumulation="per_rank" the ranks run different numbers of micro-batches, but SyncBatchNorm (stage 0 '
            'converts BatchNorm to it) waits for all ranks in each micro-batch; use accumulation="shared"'
        )
    profile = _existing_profile(setup, description)
    if profile is not None:
        return profile
    profile = profile_ranks(
        model,
        optimizer,
        TrialRun(model, optimizer, criterion, config.training_step, loader),
        description,
        stage=setup.stage,
        precision=setup.precision,
        cap=min(config.global_batch_size, config.max_micro_batch or config.global_batch_size),
        synchronize=setup.synchronize,
        replica_of=setup.replica_of,
    )
    if config.profile is not None and dist.get_rank() == 0:
        save_profile(profile, config.profile)
    return profile


def attach_batches(
    setup: BatchSetup,
    profile: BatchProfile,
    model: ModelWrapper,
    optimizer: OptimizerWrapper,
    loader: HeteroDataLoader,
    lr_scheduler: LRScheduler | None,
) -> BatchBalancer:
    """Divide the loader's batches, and replace the methods that the training loop calls by ones for uneven batches.

    Returns:
        What divides the batches again when the speed of a rank changes.
    """
    timer = _timer(setup, profile, model, optimizer, loader)
    balancer = BatchBalancer(setup.config, profile, setup.stage, loader, timer, setup.replica_of)
    accumulation = GradientAccumulation(
        loader,
        max(setup.replica_of) + 1,
        setup.synchronize,
        max_norm=setup.max_norm,
        on_step=balancer.on_step,
    )
    accumulation.attach(model, optimizer, lr_scheduler)
    return balancer


def _timer(
    setup: BatchSetup,
    profile: BatchProfile,
    model: ModelWrapper,
    optimizer: OptimizerWrapper,
    loader: HeteroDataLoader,
) -> GlobalBatchTimer:
    """What times this rank's global batches. It must be attached before gradients are accumulated, so that it sees the
    optimizer's steps only."""
    if setup.stage == 3 and get_accelerator().name != "cpu":
        replica = setup.replica_of[dist.get_rank()]
        whole = divider_of(setup.config, profile, setup.stage).curves[replica]
        forward = forward_curve(profile.kinds[profile.ranks[replica]], whole.max_batch)
        if forward is not None:
            return ForwardOnlyTimer(model, loader, whole, forward)
    timer = BusyTimer(setup.replica_of)
    timer.attach(optimizer)
    loader.load_timer = timer
    return timer
