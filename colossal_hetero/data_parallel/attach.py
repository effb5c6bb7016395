"""Puts uneven batches around what a plugin has configured: measure, divide, accumulate."""

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
from ..profiling.batches.forward_watch import ForwardWatch
from ..profiling.batches.rank_profiler import ModelDescription, profile_ranks
from ..profiling.training_step import TrialRun
from .accumulation import Accumulation
from .batch_balancer import BatchBalancer
from .config import BatchConfig
from .loader import HeteroDataLoader

__all__ = ["BatchSetup", "attach_batches", "profile_for"]


@dataclass(frozen=True)
class BatchSetup:
    """What the parts that deal with batches have to know of a plugin."""

    config: BatchConfig
    stage: int
    """Of ZeRO."""
    precision: str
    replica_of: Sequence[int]
    """Which replica of the model each rank belongs to."""
    synchronize: Callable[[bool], None]
    """Told before a forward pass whether its gradients are to be summed over replicas."""
    max_norm: float = 0.0
    """Clip by it before the step; 0 where the optimizer does so itself, or nobody is to."""


def _known_profile(setup: BatchSetup, description: ModelDescription) -> BatchProfile | None:
    """The profile file that the user named, checked against devices and model; None if there is none yet.

    Every rank calls it. Raises ``ValueError`` where the file is no profile, or one of others.
    """
    path = setup.config.profile
    found: list[Any] = [None] * dist.get_world_size()
    device = device_name(get_accelerator().get_current_device())
    dist.all_gather_object(found, (path is not None and Path(path).exists(), device))
    if path is None or not any(exists for exists, _ in found):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"profile={str(path)!r} cannot be written: {Path(path).absolute().parent} is no directory")
        return None
    missing = [rank for rank, (exists, _) in enumerate(found) if not exists]
    if missing:
        raise ValueError(f"profile={str(path)!r} is not there for ranks {missing}; copy it to their machines")
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
    """The profile that the user named, or else a new one, which is written where that was to be.

    Raises:
        ValueError: the file is no profile, or one of other devices or another model; or the model has collectives that
            unequally many micro-batches would hang.
        RuntimeError: measuring failed.
    """
    config = setup.config
    if config.accumulation == "own" and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise ValueError(
            'accumulation="own" lets ranks run unequally many micro-batches, but SyncBatchNorm, which stage 0 makes of '
            'BatchNorm, waits for all ranks in each; use accumulation="shared"'
        )
    profile = _known_profile(setup, description)
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
    """Divide the loader's batches and make the training loop's calls fit them."""
    watch = ForwardWatch(model, lambda: 1 if loader.current is None else max(1, loader.current.samples))
    balancer = BatchBalancer(setup.config, profile, setup.stage, loader, watch, setup.replica_of)
    accumulation = Accumulation(
        loader,
        max(setup.replica_of) + 1,
        setup.synchronize,
        max_norm=setup.max_norm,
        on_step=balancer.on_step,
    )
    accumulation.attach(model, optimizer, lr_scheduler)
    return balancer
