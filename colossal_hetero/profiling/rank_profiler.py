"""Profile all ranks of a boosted model at once, with model, optimizer and random state restored afterwards."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from rich.console import Console
from torch import nn

from ..colossalai_support.accelerator import causes, get_accelerator, is_out_of_memory
from ..common.ranks import of_every_rank, on_every_rank
from ..planner.batches.batch_profile import BatchProfile, DeviceProfile, ModelIdentity
from .aborted_step import abort_step
from .device_profiler import profile_device, sustained_flops
from .local_collectives import local_collectives
from .optimizer_state import optimizer_state_bytes, optimizer_step_seconds, step_temporary_bytes
from .preserved_state import preserved_state
from .progress import Progress, ProgressDisplay
from .training_step import TrialRun

# Batch normalization of inputs ``[N, C]`` needs two values per channel, so a model with such a layer cannot train with
# a single sample. Other training steps need pairs or triplets.


SMALL = 4  # every number of samples up to this is tried
_MESSAGE = "Expected more than 1 value per channel"  # begin of the message of torch's ``ValueError`` in ``batch_norm``


def is_too_few_samples(error: BaseException | None) -> bool:
    """True if ``error``, or an error that caused it, says that a batch normalization had a single value per channel."""
    return any(isinstance(each, ValueError) and _MESSAGE in str(each) for each in causes(error))


def smallest_batch(run: Callable[[int], object], cap: int, abort: Callable[[], None]) -> int:
    """The first of 1, 2, 3, 4 samples with which ``run`` runs; 8, 16, … if a batch normalization asks for them."""
    samples, first = 1, None
    while True:
        try:
            run(samples)
            return samples
        except Exception as error:
            first = first or error
            following = samples + 1 if samples < SMALL else 2 * samples
            is_normalization = is_too_few_samples(error)
            if is_out_of_memory(error) or not (is_normalization or samples < SMALL) or following > cap:
                if not (is_normalization and following > cap):
                    raise first from None
                raise ValueError(
                    f"the model cannot train with micro-batches of {cap}: a batch normalization needs more than one "
                    f"value per channel. Allow micro-batches of at least {following} samples (max_micro_batch, "
                    "global_batch_size), or use a normalization that needs no batch, such as GroupNorm or LayerNorm"
                ) from error
        abort()
        samples = following


FIRST_STEPS = 2  # number of steps after which DDP's buckets have their final order
SYNCHRONIZATIONS = 3
MAX_SYNCHRONIZATIONS = 30
SYNCHRONIZED_SECONDS = 0.5
"""Least time of all synchronizations, because a CPU quota does not stop a device in a short one, as in training."""


@dataclass(frozen=True)
class ModelDescription:
    """Identity of a model before it is wrapped, cast or sharded."""

    name: str
    parameters: int
    trained: int
    digest: str  # hash of the parameters' names, shapes and dtypes


def describe(model: nn.Module) -> ModelDescription:
    """Describe ``model``, which must not be wrapped, cast or sharded yet."""
    named = list(model.named_parameters())
    lines = [f"{name} {tuple(value.shape)} {value.dtype} {value.requires_grad}" for name, value in named]
    return ModelDescription(
        name=type(model).__name__,
        parameters=sum(value.numel() for _, value in named),
        trained=sum(value.numel() for _, value in named if value.requires_grad),
        digest=hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
    )


def profile_ranks(
    trial: TrialRun,
    description: ModelDescription,
    *,
    stage: int,
    precision: str,
    cap: int,
    synchronize: Callable[[bool], None],
    replica_of: Sequence[int],
    multiple_of: int = 1,
) -> BatchProfile:
    """Measure every rank's largest micro-batch and times, all at once, and a synchronization (Poplar, Algorithm 1).
    Model, optimizer, buffers, gradients and random state are restored bit for bit."""
    model, optimizer = trial.model, trial.optimizer
    cap //= multiple_of

    def run(units: int) -> float:
        return trial(units * multiple_of)

    def find_smallest() -> int:
        """The fewest samples that this rank can train with. Errors of the training step show here, without others."""
        synchronize(stage != 0)
        with local_collectives(model):
            return smallest_batch(run, cap, lambda: abort_step(model, optimizer))

    def communicate_first() -> None:
        """Let libraries allocate the memory that they keep for communication: connections, threads, final buckets."""
        synchronize(True)
        for _ in range(FIRST_STEPS):
            run(smallest)

    def measure() -> tuple[DeviceProfile, int]:
        to_come = optimizer_state_bytes(optimizer)
        trial.step_bytes = step_temporary_bytes(optimizer)
        # Buckets and shards are filled as in training, but in stage 0 DDP does so in C++ and communicates at once.
        synchronize(stage != 0)
        here = get_accelerator().get_current_device()
        with local_collectives(model):
            device = profile_device(
                run,
                cap,
                state_bytes_to_come=to_come,
                device=here,
                smallest=smallest,
                on_progress=tell,
                abort=lambda: abort_step(model, optimizer),
                flops=sustained_flops(here),
            )
        of_units = device.model_copy(update={"step_seconds": optimizer_step_seconds(optimizer)})
        return _in_samples(of_units, multiple_of), to_come

    def synchronization_seconds() -> float:
        """Additional time of a step of few samples with communication; it includes waiting for other ranks."""

        def both() -> tuple[float, float]:
            synchronize(stage != 0)
            with local_collectives(model):
                local = run(smallest)
            synchronize(True)
            dist.barrier()
            return local, run(smallest)

        both()
        timed = [both() for _ in range(SYNCHRONIZATIONS)]
        # All ranks must agree on the number of synchronizations.
        typical = of_every_rank(statistics.median(sum(pair) for pair in timed))
        wanted = math.ceil(SYNCHRONIZED_SECONDS / max(typical))
        timed += [both() for _ in range(min(wanted, MAX_SYNCHRONIZATIONS) - SYNCHRONIZATIONS)]
        # Means without the longest one: a device that is stopped now and then is not stopped in each synchronization.
        local, synchronized = (sorted(times)[:-1] for times in zip(*timed, strict=True))
        return statistics.fmean(synchronized) - statistics.fmean(local)

    try:
        with preserved_state(model, optimizer), _progress() as tell:
            smallest = max(on_every_rank(find_smallest, "a first training step"))
            communicate_first()
            measured = on_every_rank(measure, "measuring batches")
            devices = [device for device, _ in measured]
            fits = all(device.max_batch > 0 for device in devices)
            # Every rank waits for the slowest one, so the smallest value contains the least waiting.
            seconds = min(on_every_rank(synchronization_seconds, "measuring communication")) if fits else 0.0
            optimizer.zero_grad()
    finally:
        synchronize(True)
    replicas = [
        _slowest([device for device, replica in zip(devices, replica_of, strict=True) if replica == own])
        for own in range(max(replica_of) + 1)
    ]
    states = [to_come for _, to_come in measured]
    return BatchProfile(
        stage=stage,
        precision=precision,
        model=_identity(description, stage, precision, sum(states) if stage else states[0]),
        communication_seconds=max(0.0, seconds),
        kinds=tuple(replicas),
        ranks=tuple(range(len(replicas))),
    )


def _in_samples(device: DeviceProfile, unit: int) -> DeviceProfile:
    return device.model_copy(
        update={
            "sample_bytes": -(-device.sample_bytes // unit),
            "max_batch": device.max_batch * unit,
            "min_batch": device.min_batch * unit,
            "points": tuple(point.model_copy(update={"batch": point.batch * unit}) for point in device.points),
        }
    )


def _slowest(devices: Sequence[DeviceProfile]) -> DeviceProfile:
    """Merge profiles of devices that wait for each other: the longest times and the smallest limits."""
    times = [{point.batch: point for point in device.points} for device in devices]
    steps = [device.step_seconds for device in devices if device.step_seconds is not None]
    common = sorted(set.intersection(*(set(points) for points in times)))
    largest = ("state_bytes", "sample_bytes", "min_batch", "memory_bound")
    update = {name: max(getattr(device, name) for device in devices) for name in largest}
    update |= {name: min(getattr(device, name) for device in devices) for name in ("memory_bytes", "max_batch")}
    return devices[0].model_copy(
        update={
            **update,
            "device": " + ".join(device.device for device in devices),
            "step_seconds": max(steps) if len(steps) == len(devices) else None,
            "points": tuple(max((each[size] for each in times), key=lambda each: each.seconds) for size in common),
        }
    )


def _identity(description: ModelDescription, stage: int, precision: str, state_bytes: int) -> ModelIdentity:
    # ZeRO 1 and 2 hold parameters in the chosen precision and fp32 copies; DDP and FSDP cast fp32 ones when used.
    zero = stage in (1, 2)
    width = 2 if zero and precision != "fp32" else 4
    return ModelIdentity(
        name=description.name,
        parameters=description.parameters,
        parameter_bytes=width * description.parameters,
        gradient_bytes=width * description.trained,
        optimizer_bytes=state_bytes + (4 * description.trained if zero else 0),
        digest=description.digest,
    )


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    with console.status("measuring memory and speed of each device") as status:
        yield ProgressDisplay(console, status)
