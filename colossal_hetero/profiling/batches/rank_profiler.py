"""Profiles all ranks of a boosted model at once, and leaves everything as it was."""

from __future__ import annotations

import hashlib
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
from ..training_step import TrialRun
from .device_profiler import BatchProgress, optimizer_state_bytes, peak_flops, profile_device
from .forward_timer import ForwardTimer

__all__ = ["ModelDescription", "describe", "profile_ranks"]

FIRST_STEPS = 2
"""Steps after which DDP has its buckets in their final order."""

SYNCHRONIZATIONS = 3
"""How often one is timed."""


@dataclass(frozen=True)
class ModelDescription:
    """What tells a model from another before it is wrapped, cast or sharded."""

    name: str
    parameters: int
    trained: int
    digest: str


def describe(model: nn.Module) -> ModelDescription:
    """The model's name, its numbers of parameters, and a digest of their names, shapes and dtypes."""
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
) -> BatchProfile:
    """Measure every rank's largest micro-batch and its times, all ranks at once, and what a synchronization takes.

    Model, optimizer, buffers, gradients and random state are left bit for bit as they are found (Poplar, Algorithm 1).

    Args:
        model: as the stage's plugin wrapped it.
        optimizer: likewise.
        trial: one forward and backward pass.
        description: of the model before it was wrapped.
        stage: of ZeRO.
        precision: ``fp32``, ``fp16`` or ``bf16``.
        cap: no larger micro-batch is tried.
        synchronize: tells whether the next backward pass sums gradients over ranks.
        replica_of: which replica of the model each rank belongs to; a replica of several (tensor-parallel) ranks is
            as slow as its slowest and holds what its smallest holds.

    Raises:
        RuntimeError: on every rank, if a rank failed for another reason than memory; it names the rank and the error.
    """
    size = 1

    def run(samples: int) -> tuple[float, float]:
        nonlocal size
        size = samples
        watch.take()
        seconds = trial(samples)
        return seconds, sum(forward for _, forward in watch.take())

    def communicate_first() -> None:
        """Let libraries allocate what they keep for communication: connections, threads, buckets in their final
        order."""
        synchronize(True)
        for _ in range(FIRST_STEPS):
            run(1)

    def measure() -> tuple[DeviceProfile, int]:
        to_come = optimizer_state_bytes(optimizer)
        # Buckets and shards are filled as in training. Stage 0 fills its own in C++, which sums them at once.
        synchronize(stage != 0)
        here = get_accelerator().get_current_device()
        with local_collectives(model):
            device = profile_device(
                run,
                cap,
                state_bytes_to_come=to_come,
                device=here,
                on_progress=tell,
                abort=lambda: abort_step(model, optimizer),
                flops=peak_flops(here),
            )
        return device, to_come

    def synchronization_seconds() -> float:
        """What a step with the smallest micro-batch takes longer when it communicates. Contains waiting for others."""
        apart, together = [], []
        for _ in range(SYNCHRONIZATIONS + 1):
            synchronize(stage != 0)
            with local_collectives(model):
                apart.append(run(1)[0])
            synchronize(True)
            dist.barrier()
            together.append(run(1)[0])
        return statistics.median(together[1:]) - statistics.median(apart[1:])

    watch = ForwardTimer(model, lambda: size)
    try:
        with preserved_state(model, optimizer), _progress() as tell:
            communicate_first()
            measured = on_every_rank(measure, "measuring batches")
            devices = [device for device, _ in measured]
            fits = all(device.max_batch > 0 for device in devices)
            # Every rank waits for the slowest: the one that waited least has measured the communication itself.
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


def _slowest(devices: Sequence[DeviceProfile]) -> DeviceProfile:
    """What several devices that wait for each other can do together."""
    first = devices[0]
    if len(devices) == 1:
        return first
    times = [{point.batch: point for point in device.points} for device in devices]
    common = sorted(set.intersection(*(set(points) for points in times)))
    return first.model_copy(
        update={
            "device": " + ".join(device.device for device in devices),
            "memory_bytes": min(device.memory_bytes for device in devices),
            "state_bytes": max(device.state_bytes for device in devices),
            "sample_bytes": max(device.sample_bytes for device in devices),
            "max_batch": min(device.max_batch for device in devices),
            "memory_bound": any(device.memory_bound for device in devices),
            "points": tuple(
                max((points[batch] for points in times), key=lambda point: point.seconds) for batch in common
            ),
        }
    )


def _identity(description: ModelDescription, stage: int, precision: str, state_bytes: int) -> ModelIdentity:
    # ZeRO's stages 1 and 2 compute in the precision asked for and keep fp32 weights beside; DDP and FSDP cast on the
    # fly.
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
    """Shows on the first rank what is being tried."""
    if dist.get_rank() != 0:
        yield lambda progress: None
        return
    with Console(stderr=True).status("measuring what each device can hold and how fast it is") as status:
        yield lambda progress: status.update(
            f"measuring what each device can hold and how fast it is: {progress.action}, {progress.batch} samples, "
            f"pass {progress.runs + 1}"
        )
