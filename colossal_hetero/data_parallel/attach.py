"""Add uneven batches to a model, optimizer and loader that a plugin has configured: measure, divide, accumulate."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from ..colossalai_support.accelerator import get_accelerator, is_out_of_memory
from ..common.atomic_files import check_writable
from ..common.methods import wrap_method
from ..common.ranks import from_rank_0, of_every_rank, print_on_rank_0
from ..common.text import print_words
from ..planner.batches.batch_profile import BatchProfile, load_profile, save_profile
from ..profiling.device_profiler import device_name
from ..profiling.local_collectives import local_collectives
from ..profiling.loss_check import check_loss
from ..profiling.memory import recover
from ..profiling.preserved_state import preserved_state, random_state
from ..profiling.rank_profiler import ModelDescription, profile_ranks
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


class MeasuredBatches:
    """The batches of a configured model, optimizer and loader: measured at first, and then divided (:meth:`attach`).
    The profile is that of the setup, of the user's file, or a new one. Every rank calls both."""

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
        self._path = None if setup.config.profile is None else Path(setup.config.profile)
        self._profile = self._find_profile(description)

    def _find_profile(self, description: ModelDescription) -> BatchProfile:
        setup, config, loader, trial = self._setup, self._setup.config, self._loader, self._trial
        if config.accumulation == "per_rank" and self._has_synchronized_normalization():
            raise ValueError(
                'with accumulation="per_rank" the ranks run different numbers of micro-batches, but SyncBatchNorm '
                '(stage 0 converts BatchNorm to it) waits for all ranks in each micro-batch; use accumulation="shared"'
            )
        cap = config.largest_micro_batch
        profile: BatchProfile | None = None
        if setup.profile is not None:
            profile = setup.profile
            devices = of_every_rank(device_name(get_accelerator().get_current_device()))
            profile.check_fits(devices, description.digest, stage=setup.stage, precision=setup.precision)
        elif self._path is not None:
            profile = _read_profile(self._path, setup, description)
        loader.set_multiple(check_loss(trial, setup.replica_of, config.multiple_of))
        if loader.multiple_of > 1:
            print_on_rank_0(f"all batch sizes are multiples of {loader.multiple_of} samples")
        if cap < loader.multiple_of:
            raise ValueError(
                f"batch sizes must be multiples of {loader.multiple_of} samples, but max_micro_batch={cap}; allow more"
            )
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
            if self._path is not None:
                measured, path = profile, self._path
                from_rank_0(lambda: save_profile(measured, path))
        smallest = max(kind.min_batch for kind in profile.kinds)
        if cap < smallest:
            raise ValueError(
                f"the model trains with micro-batches of at least {smallest} samples, but max_micro_batch={cap}; allow "
                "more"
            )
        replicas = [each for each in trial.model.modules() if isinstance(each, DistributedDataParallel)]
        fits = all(kind.max_batch for kind in profile.kinds)
        if fits and any(each.find_unused_parameters for each in replicas):
            # If the very first backward pass does not sum gradients, as measuring does, the first sum fails or waits
            # forever for a parameter that was used in that pass only.
            with preserved_state(trial.model, trial.optimizer):
                setup.synchronize(True)
                trial(smallest)
                trial.optimizer.zero_grad()
        return profile

    def _has_synchronized_normalization(self) -> bool:
        return any(isinstance(module, nn.SyncBatchNorm) for module in self._trial.model.modules())

    def attach(self, lr_scheduler: LRScheduler | None) -> BatchBalancer:
        """Divide the loader's batches, and replace the methods that the training loop calls by ones for uneven ones."""
        setup, loader = self._setup, self._loader
        model, optimizer = self._trial.model, self._trial.optimizer
        assert isinstance(model, ModelWrapper)
        weight_by, total = self._total_weight(model)
        multiple = loader.multiple_of
        smallest = max(kind.min_batch for kind in self._profile.kinds)
        loader.global_sampler.placeholders = -(-smallest // multiple) * multiple
        balancer = BatchBalancer(setup, self._profile, loader, self._timer(optimizer))
        GradientAccumulation(setup, loader, total, weight_by, balancer.on_step).attach(model, optimizer, lr_scheduler)
        communicates = setup.stage == 3 or self._has_synchronized_normalization()
        communicates |= list(setup.replica_of).count(setup.replica_of[dist.get_rank()]) > 1
        OutOfMemoryGuard(loader, may_repeat=not communicates).attach(model, optimizer)
        return balancer

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
        only. None for FSDP on a GPU, where the device waits at places in the passes that no hook marks."""
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


# Profile files -------------------------------------------------------------------------------------------------------


def _read_profile(path: Path, setup: BatchSetup, description: ModelDescription) -> BatchProfile | None:
    """Rank 0's profile, checked; None if no rank has it, and rank 0 can write it. Every rank calls it."""
    everyone = of_every_rank((path.exists(), device_name(get_accelerator().get_current_device())))
    missing = [rank for rank, (exists, _) in enumerate(everyone) if not exists]
    if len(missing) == len(everyone):
        try:
            from_rank_0(lambda: check_writable(path))
        except ValueError as error:
            raise ValueError(f"profile={str(path)!r} cannot be written: {error}") from None
        return None
    if missing:
        raise ValueError(f"profile={str(path)!r} does not exist on ranks {missing}; copy it to their machines")
    profile = from_rank_0(lambda: load_profile(path))
    devices: list[list[str]] = [[] for _ in range(max(setup.replica_of) + 1)]
    for (_, device), replica in zip(everyone, setup.replica_of, strict=True):
        devices[replica].append(device)
    profile.check_fits(
        [" + ".join(each) for each in devices], description.digest, stage=setup.stage, precision=setup.precision
    )
    kinds = [profile.kinds[index] for index in profile.ranks if not profile.kinds[index].memory_bound]
    largest = min((kind.max_batch for kind in kinds if kind.max_batch), default=setup.config.largest_micro_batch)
    if largest < setup.config.largest_micro_batch:
        print_on_rank_0(
            f"the profile {path} limits micro-batches to {largest} samples, though memory does not; remove the file to "
            "measure again"
        )
    return profile


# Out of memory -------------------------------------------------------------------------------------------------------
# [Note: out of memory in training] Other ranks count on the samples of a micro-batch, so it cannot be made smaller. If
# forward runs out of memory and does not communicate, it is repeated with its saved tensors outside the device's
# memory, as later ones of that size are at once; the result is the same. A backward pass has released parts of its
# graph, and others may wait in its collectives: this rank raises an error. Both say how the next run uses smaller
# micro-batches.

MIN_BYTES = 1 << 16  # smaller tensors stay in place


@contextmanager
def stored_outside(model: nn.Module) -> Iterator[None]:
    """In the block, autograd saves tensors, except those of ``model`` itself, in the host's memory (GPU) or in files
    (CPU). The results are the same, bit for bit, but passes take longer."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        small = tensor.numel() * tensor.element_size() < MIN_BYTES
        if small or tensor.layout != torch.strided or tensor.untyped_storage().data_ptr() in own:
            return tensor
        if tensor.device.type != "cpu":
            device, copy = tensor.device, tensor.detach().to("cpu")
            return lambda: copy.to(device)
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed when autograd releases the function below
        part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
        torch.save(tensor.detach().clone() if part else tensor.detach(), file)
        return functools.partial(_read, file)

    def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _read(file: Any) -> Tensor:
    file.seek(0)
    return torch.load(file, weights_only=True)


class OutOfMemoryGuard:
    """Handles out-of-memory errors of a model in training; see [Note: out of memory in training]."""

    def __init__(self, loader: HeteroDataLoader, *, may_repeat: bool) -> None:
        self._loader = loader
        self._may_repeat = may_repeat
        self._outside_from: int | None = None

    def attach(self, model: ModelWrapper, optimizer: OptimizerWrapper) -> None:
        wrap_method(model, "forward", functools.partial(self._forward, model))
        wrap_method(optimizer, "backward", self._backward)

    def _samples(self) -> int:
        return 0 if self._loader.current is None else self._loader.current.samples

    def _forward(self, model: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not (model.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        samples = self._samples()
        if self._outside_from is not None and samples >= self._outside_from:
            with stored_outside(model):
                return forward(*args, **kwargs)
        restore_random_state = random_state()
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not self._may_repeat:
                raise self._failure("forward", samples) from error
            recover(error)
        restore_random_state()
        self._outside_from = samples
        self._tell(samples)
        # Buffers were broadcast before the failed pass, and the other ranks do not repeat that.
        with self._failing("forward"), local_collectives(), stored_outside(model):
            return forward(*args, **kwargs)

    def _backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._failing("backward"):
            return backward(*args, **kwargs)

    def _tell(self, samples: int) -> None:
        print_words(
            f"rank {dist.get_rank()} ran out of memory in the forward pass of a micro-batch of {samples} samples. The "
            "pass is repeated with activations outside the device's memory, as will be all of this size; nothing is "
            f"lost, but they take longer. {_for_the_next_run(samples)}"
        )

    @contextmanager
    def _failing(self, phase: str) -> Iterator[None]:
        """In the block, running out of memory cannot be repaired."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self._failure(phase, self._samples()) from error

    def _failure(self, phase: str, samples: int) -> RuntimeError:
        current = self._loader.current
        where = "" if current is None else f" of global batch {current.global_batch}"
        return RuntimeError(
            f"rank {dist.get_rank()} ran out of memory in the {phase} pass of a micro-batch of {samples} samples{where}"
            f", and the pass cannot be repeated. {_for_the_next_run(samples)} Start again from a checkpoint"
        )


def _for_the_next_run(samples: int) -> str:
    smaller = max(samples - max(samples // 8, 1), 1)
    return f"For the next run, set max_micro_batch={smaller}, or lower max_batch of this rank in a profile file."
