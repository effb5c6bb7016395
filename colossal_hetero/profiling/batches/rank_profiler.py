"""Profile all ranks of a boosted model at once, with model, optimizer and random state restored afterwards."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from colossalai.interface import ModelWrapper, OptimizerWrapper
from rich.console import Console
from torch import nn

from ...accelerator import get_accelerator
from ...planner.batches.batch_profile import BatchProfile, DeviceProfile, ModelIdentity
from ...processes.every_rank import on_every_rank
from ..aborted_step import abort_step
from ..local_collectives import local_collectives
from ..preserved_state import preserved_state
from ..progress_display import ProgressDisplay
from ..training_step import TrialRun
from .device_profiler import peak_flops, profile_device
from .forward_timer import ForwardTimer
from .optimizer_state import optimizer_state_bytes, step_temporary_bytes
from .optimizer_step import optimizer_step_seconds
from .progress import BatchProgress
from .smallest_batch import smallest_batch

__all__ = ["ModelDescription", "describe", "profile_ranks"]

FIRST_STEPS = 2
"""Number of steps after which DDP's buckets have their final order."""

SYNCHRONIZATIONS = 3
"""Least number of synchronizations that are timed."""
MAX_SYNCHRONIZATIONS = 30
SYNCHRONIZED_SECONDS = 0.5
"""Synchronizations are repeated for about so long. A device under a CPU quota is not stopped in a short one, but it is
in training, where it also computes."""


@dataclass(frozen=True)
class ModelDescription:
    """Identity of a model before it is wrapped, cast or sharded."""

    name: str
    """Name of its class."""
    parameters: int
    """Number of parameters."""
    trained: int
    """Number of trainable parameters."""
    digest: str
    """Hash of the parameters' names, shapes and dtypes."""


def describe(model: nn.Module) -> ModelDescription:
    """The description of ``model``, which must not be wrapped, cast or sharded yet."""
    lines = [
        f"{name} {tuple(value.shape)} {value.dtype} {value.requires_grad}" for name, value in model.named_parameters()
    ]
    return ModelDescription(
        name=type(model).__name__,
        parameters=sum(value.numel() for value in model.parameters()),
        trained=sum(value.numel() for value in model.parameters() if value.requires_grad),
        digest=hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
    )


def profile_ranks(
    model: ModelWrapper,
    optimizer: OptimizerWrapper,
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
    """Measure every rank's largest micro-batch and times, all ranks at once, and the time of a synchronization.

    Model, optimizer, buffers, gradients and random state are restored bit for bit (Poplar, Algorithm 1).

    Args:
        model: the model, wrapped by the plugin of the stage.
        optimizer: the optimizer, wrapped by the plugin of the stage.
        trial: runs one forward and backward pass.
        description: description of the model before it was wrapped.
        stage: stage of ZeRO.
        precision: ``fp32``, ``fp16`` or ``bf16``.
        cap: largest micro-batch that is tried, in samples.
        synchronize: called with whether the next backward pass is to sum gradients over ranks.
        replica_of: index of the model replica that each rank belongs to, by rank. A replica of several
            (tensor-parallel) ranks has the time of the slowest and the limit of the smallest of them.
        multiple_of: only multiples of so many samples are run. Inside of this function, sizes are in units of them.

    Raises:
        RuntimeError: on every rank, if a rank failed for another reason than memory; it names the rank and the error.
    """
    size, cap = 1, cap // multiple_of

    def run(units: int) -> tuple[float, float]:
        nonlocal size
        size = units * multiple_of
        watch.take()
        seconds = trial(size)
        return seconds, sum(forward for _, forward in watch.take())

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
        # Fill buckets and shards as in training. In stage 0 this is not possible, because DDP fills its buckets in C++
        # and communicates at once.
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
                flops=peak_flops(here),
            )
        of_units = device.model_copy(update={"step_seconds": optimizer_step_seconds(optimizer)})
        return _in_samples(of_units, multiple_of), to_come

    def synchronization_seconds() -> float:
        """How much longer a step of few samples takes with communication. It includes waiting for other ranks."""

        def both() -> tuple[float, float]:
            synchronize(stage != 0)
            with local_collectives(model):
                local = run(smallest)[0]
            synchronize(True)
            dist.barrier()
            return local, run(smallest)[0]

        both()
        timed = [both() for _ in range(SYNCHRONIZATIONS)]
        # All ranks must agree on the number of synchronizations.
        everyone: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(everyone, statistics.median(sum(pair) for pair in timed))
        wanted = math.ceil(SYNCHRONIZED_SECONDS / max(everyone))
        timed += [both() for _ in range(min(wanted, MAX_SYNCHRONIZATIONS) - SYNCHRONIZATIONS)]
        # Means without the longest one: a device that is stopped now and then is not stopped in each synchronization.
        local, synchronized = (sorted(times)[:-1] for times in zip(*timed, strict=True))
        return statistics.fmean(synchronized) - statistics.fmean(local)

    watch = ForwardTimer(model, lambda: size)
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
        watch.remove()
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
    """A profile of batches in samples, from one in units of so many samples."""
    return device.model_copy(
        update={
            "sample_bytes": -(-device.sample_bytes // unit),
            "max_batch": device.max_batch * unit,
            "searched_batch": device.searched_batch and device.searched_batch * unit,
            "min_batch": device.min_batch * unit,
            "points": tuple(point.model_copy(update={"batch": point.batch * unit}) for point in device.points),
        }
    )


def _slowest(devices: Sequence[DeviceProfile]) -> DeviceProfile:
    """The profile of several devices that wait for each other: the longest times and the smallest limits."""
    first = devices[0]
    if len(devices) == 1:
        return first
    times = [{point.batch: point for point in device.points} for device in devices]
    steps = [device.step_seconds for device in devices if device.step_seconds is not None]
    common = sorted(set.intersection(*(set(points) for points in times)))
    return first.model_copy(
        update={
            "device": " + ".join(device.device for device in devices),
            "memory_bytes": min(device.memory_bytes for device in devices),
            "state_bytes": max(device.state_bytes for device in devices),
            "sample_bytes": max(device.sample_bytes for device in devices),
            "max_batch": min(device.max_batch for device in devices),
            "memory_bound": any(device.memory_bound for device in devices),
            "min_batch": max(device.min_batch for device in devices),
            "step_seconds": max(steps) if len(steps) == len(devices) else None,
            "points": tuple(
                max((points[batch] for points in times), key=lambda point: point.seconds) for batch in common
            ),
        }
    )


def _identity(description: ModelDescription, stage: int, precision: str, state_bytes: int) -> ModelIdentity:
    # ZeRO stages 1 and 2 hold the parameters in the chosen precision and additional fp32 copies; DDP and FSDP hold fp32
    # parameters and cast them when they are used.
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
def _progress() -> Iterator[Callable[[BatchProgress], None]]:
    """Show on rank 0 what it measures, and how long it still takes; yields the function to call with the progress."""
    if dist.get_rank() != 0:
        yield lambda progress: None
        return
    console = Console(stderr=True)
    with console.status("measuring memory and speed of each device") as status:
        yield ProgressDisplay(console, status)
