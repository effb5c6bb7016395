"""Add uneven batches to a model, optimizer and loader that a plugin has configured: measure, divide, accumulate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from ..colossalai_support.accelerator import get_accelerator
from ..common.ranks import on_every_rank, print_on_rank_0
from ..planner.batches.batch_profile import BatchProfile
from ..profiling.loss_check import check_loss
from ..profiling.preserved_state import inner_optimizer, preserved_state
from ..profiling.rank_profiler import ModelDescription, changes, profile_ranks, speed_now
from ..profiling.training_step import TrialRun
from .accumulation import GradientAccumulation
from .batch_balancer import BatchBalancer
from .busy_timer import BusyTimer
from .config import BatchSetup
from .loader import HeteroDataLoader
from .loss_weights import (
    CountedTotal,
    SampleTotal,
    refuse_ignored,
    require_mean_over_samples,
    samples_in,
    weight_function,
)
from .out_of_memory import OutOfMemoryGuard
from .saved_profile import CachedProfile, ProfileFile, context_of, device_names


class MeasuredBatches:
    """The batches of a configured model, optimizer and loader: measured at first, and then divided (:meth:`attach`).
    Every rank calls both. The user's loss is checked in any case.

    The profile is that of the setup, of the user's file, of an earlier run, or a new one. It is changed if a rank runs
    out of memory.
    """

    def __init__(
        self,
        setup: BatchSetup,
        description: ModelDescription,
        model: ModelWrapper,
        optimizer: OptimizerWrapper,
        criterion: Any,
        loader: HeteroDataLoader,
    ) -> None:
        self._setup, self._loader = setup, loader
        self._trial = TrialRun(model, optimizer, criterion, setup.config.training_step, loader)
        self._replica = setup.replica_of[dist.get_rank()]
        self._profile, self._path = self._find_profile(description)

    def _find_profile(self, description: ModelDescription) -> tuple[BatchProfile, Path | None]:
        """The profile, and its path, if it is kept."""
        setup, config, loader, trial = self._setup, self._setup.config, self._loader, self._trial
        if config.accumulation == "per_rank" and any(
            isinstance(module, nn.SyncBatchNorm) for module in trial.model.modules()
        ):
            raise ValueError(
                'with accumulation="per_rank" the ranks run different numbers of micro-batches, but SyncBatchNorm '
                '(stage 0 converts BatchNorm to it) waits for all ranks in each micro-batch; use accumulation="shared"'
            )
        cap = config.largest_micro_batch
        profile: BatchProfile | None = None
        kept: ProfileFile | CachedProfile | None = None
        if setup.profile is not None:
            profile = setup.profile
            devices = device_names(setup.replica_of)
            profile.check_fits(devices, description.digest, stage=setup.stage, precision=setup.precision)
        elif config.profile is not None:
            kept = ProfileFile(config.profile)
            profile = kept.read(setup.replica_of, description, setup.stage, setup.precision, cap)
            if profile is None:
                kept.check_writable()
        loader.set_multiple(check_loss(trial, setup.replica_of, config.multiple_of))
        if loader.multiple_of > 1:
            print_on_rank_0(f"all batch sizes are multiples of {loader.multiple_of} samples")
        if cap < loader.multiple_of:
            raise ValueError(
                f"batch sizes must be multiples of {loader.multiple_of} samples, but max_micro_batch={cap}; allow more"
            )
        if kept is None and profile is None:
            kept = self._cached_profile(description, cap)
            profile = self._still_right(kept)
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
            assert kept is not None
            kept.write(profile)
        smallest = max(kind.min_batch for kind in profile.kinds)
        if cap < smallest:
            raise ValueError(
                f"the model trains with micro-batches of at least {smallest} samples, but max_micro_batch={cap}; allow "
                "more"
            )
        if all(kind.max_batch for kind in profile.kinds):
            self._sum_once(smallest)
        return profile, None if kept is None else kept.path

    def _sum_once(self, samples: int) -> None:
        """Let DDP sum gradients before training, as measuring does, if it searches for unused parameters. If the very
        first backward pass runs inside ``no_sync``, the first sum fails or waits forever for a parameter that was used
        in that pass only."""
        trial = self._trial
        if any(
            isinstance(each, DistributedDataParallel) and each.find_unused_parameters for each in trial.model.modules()
        ):
            with preserved_state(trial.model, trial.optimizer):
                self._setup.synchronize(True)
                trial(samples)
                trial.optimizer.zero_grad()

    def _cached_profile(self, description: ModelDescription, cap: int) -> CachedProfile:
        setup, trial, multiple = self._setup, self._trial, self._loader.multiple_of
        step, criterion = setup.config.training_step, trial.criterion
        with preserved_state(trial.model, trial.optimizer):
            samples = trial.batch([trial.first] * multiple)
        context = context_of(
            trial.model,
            inner_optimizer(trial.optimizer),
            samples,
            description,
            stage=setup.stage,
            precision=setup.precision,
            cap=cap,
            replica_of=list(setup.replica_of),
            multiple_of=multiple,
            training_step=f"{step.__module__}.{getattr(step, '__qualname__', type(step).__qualname__)}",
            criterion=criterion if criterion is None else getattr(criterion, "__qualname__", repr(criterion)),
        )
        return CachedProfile(setup.config.profile_cache, context)

    def _still_right(self, cached: CachedProfile) -> BatchProfile | None:
        """The profile of an earlier run, if every rank's memory and speed are still the same."""
        profile = cached.read()
        if profile is None:
            return None
        setup, device = self._setup, profile.kinds[profile.ranks[self._replica]]
        ranks = on_every_rank(
            lambda: speed_now(device, self._trial, setup.synchronize, setup.stage), "checking an earlier profile"
        )
        changed = changes(ranks, setup.replica_of)
        if changed is not None:
            print_on_rank_0(f"the profile of an earlier run is not right any more ({changed}); measuring again")
            return None
        print_on_rank_0(f"memory and speed of each device are those of an earlier run ({cached.path})")
        return profile

    def attach(self, lr_scheduler: LRScheduler | None) -> tuple[BatchBalancer, GradientAccumulation]:
        """Divide the loader's batches, and replace the methods that the training loop calls by ones for uneven ones."""
        setup, loader = self._setup, self._loader
        model, optimizer = self._trial.model, self._trial.optimizer
        assert isinstance(model, ModelWrapper)
        weight_by, total = self._total_weight(model)
        multiple = loader.multiple_of
        loader.set_placeholders(max(-(-kind.min_batch // multiple) * multiple for kind in self._profile.kinds))
        timer = self._timer(optimizer)
        balancer = BatchBalancer(setup, self._profile, loader, timer)
        accumulation = GradientAccumulation(setup, loader, total, weight_by, on_step=balancer.on_step)
        accumulation.attach(model, optimizer, lr_scheduler)
        communicates = (
            setup.stage == 3
            or list(setup.replica_of).count(self._replica) > 1
            or any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        )
        OutOfMemoryGuard(loader, self._replica, self._path, may_repeat=not communicates).attach(model, optimizer)
        return balancer, accumulation

    def _total_weight(self, model: ModelWrapper) -> tuple[Any, SampleTotal]:
        """What losses are means over (by default samples, which a trial confirms), and what adds up the weights. The
        loader gets the function that weighs a batch."""
        setup, trial, weight_by = self._setup, self._trial, self._setup.config.weight_by
        if weight_by is None:
            require_mean_over_samples(trial, setup.precision)
            weight_by = "samples"
            self._loader.check = refuse_ignored(trial.criterion)
        replicas = max(setup.replica_of) + 1
        weight_of = samples_in(trial) if weight_by == "samples" else weight_function(weight_by)
        if weight_of is None:
            return weight_by, SampleTotal(replicas)
        self._loader.weigh_by(weight_of, by_samples=weight_by == "samples")
        return weight_by, CountedTotal(replicas, model, equal_steps=setup.config.accumulation == "shared")

    def _timer(self, optimizer: OptimizerWrapper) -> BusyTimer | None:
        """Timer of this rank's global batches, attached before accumulation, so that it sees the optimizer's steps
        only. On a GPU, FSDP (stage 3) gathers and sums on streams of its own, for which the device waits at places in
        the passes that no hook marks, so that work cannot be told from waiting."""
        if self._setup.stage == 3 and get_accelerator().name != "cpu":
            print_on_rank_0(
                "at ZeRO stage 3 on GPUs, batches are divided once: if a speed changes, start again from a checkpoint, "
                "or use stage 0, 1 or 2, where they are divided again"
            )
            return None
        timer = BusyTimer(self._setup.replica_of)
        timer.attach(optimizer)
        self._loader.load_timer = timer
        return timer
