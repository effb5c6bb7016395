"""Profile a named model as one of several ranks, or without a launcher; used by ``colossal-hetero profile``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from ...accelerator import get_accelerator
from ...planner.profile.layer_profile import save_model_profile
from ...processes.launch import is_rank, local_gpu
from ..progress_display import ProgressDisplay
from .layer_profiler import MIN_SECONDS, MeasuredLayers, profile_layers
from .merge_degrees import merge_degrees
from .model_layers import describe_layers
from .named_models import build_model
from .sharded_model import check_degrees, own_group, shard

__all__ = ["ProfileRequest", "check_request", "profile_named_model"]


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """The model to profile, the settings, and the output file; see :func:`.layer_profiler.profile_layers`."""

    model: str
    """See :func:`.named_models.build_model`."""
    out: Path
    """Profile file to write."""
    image_size: int | None = None
    sequence: int = 512
    options: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: Sequence[int] = (1, 2, 4, 8)
    optimizer: str = "adam"
    precision: str = "fp32"
    min_seconds: float = MIN_SECONDS
    tensor_parallel: Sequence[int] = (1,)
    """Degrees to measure, ascending. A group has neighboring ranks of one machine."""


def check_request(request: ProfileRequest, ranks_per_node: int) -> int:
    """Check the request before any rank is started, without building weights; the number of blocks of the model.

    Raises:
        ValueError: there is no such model, a pipeline cannot cut it, or this many ranks of a machine cannot share its
            layers.
    """
    named = build_model(
        request.model,
        image_size=request.image_size,
        sequence=request.sequence,
        options=request.options,
        device="meta",
    )
    check_degrees(named.model, request.tensor_parallel, ranks_per_node)
    return len(describe_layers(named.model).row.blocks)


def profile_named_model(request: ProfileRequest, console: Console) -> MeasuredLayers:
    """Measure with all ranks of the launcher, or alone without one; rank 0 shows the progress and writes the file.

    Raises:
        ValueError: the model cannot be built or measured, or a rank failed.
    """
    rank, device = 0, torch.device("cpu")
    if is_rank():
        rank = int(os.environ["RANK"])
        device = _device(rank)
        torch.set_num_threads(max(int(os.environ.get("OMP_NUM_THREADS", "1")), 1))
        dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    else:
        device = _device(0)
    try:
        with console.status(f"building {request.model}") as status:
            parts = []
            for degree in request.tensor_parallel:
                place = "" if len(request.tensor_parallel) == 1 else f" at tensor parallel {degree}"
                show = ProgressDisplay(console, status, place)
                parts.append((degree, _measure(request, degree, device, show if rank == 0 else None)))
        measured, remarks = merge_degrees(parts)
        if rank == 0:
            for remark in remarks:
                console.print(remark, markup=False, soft_wrap=True)
            save_model_profile(measured.profile, request.out)
        if dist.is_initialized():
            # No rank may leave while another still asks rank 0 for the addresses of the others.
            dist.barrier()
        return measured
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _measure(
    request: ProfileRequest, degree: int, device: torch.device, on_progress: ProgressDisplay | None
) -> MeasuredLayers:
    """Measure the model, or its shard of this rank."""
    torch.manual_seed(0)
    named = build_model(
        request.model,
        image_size=request.image_size,
        sequence=request.sequence,
        options=request.options,
        device=device,
    )
    model, batch, group = named.model, named.batch, None
    if degree > 1:
        check_degrees(model, [degree], int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        group = own_group(degree, device)
        model = shard(model, group)
        if isinstance(batch, dict) and "input_ids" in batch:
            # Colossal-AI's sharded models need a mask, even if nothing is masked.
            batch = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    return profile_layers(
        model,
        batch,
        named.criterion,
        micro_batches=request.micro_batches,
        optimizer=request.optimizer,
        precision=request.precision,
        min_seconds=request.min_seconds,
        tensor_parallel=degree,
        group=group,
        name=request.model,
        on_progress=on_progress,
    )


def _device(rank: int) -> torch.device:
    """This rank's GPU; without GPUs another accelerator or the CPU."""
    gpu = local_gpu(rank, "measure")
    if gpu is not None:
        return gpu
    is_other = get_accelerator().name not in ("cpu", "cuda")
    return torch.device(get_accelerator().get_current_device()) if is_other else torch.device("cpu")
