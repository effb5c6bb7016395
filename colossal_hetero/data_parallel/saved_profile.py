"""Profile of an earlier run: in the user's file, or in a folder on this machine. All ranks use what rank 0 reads."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..colossalai_support.accelerator import get_accelerator
from ..common.atomic_files import check_writable, default_folder
from ..common.ranks import from_rank_0, of_every_rank, print_on_rank_0
from ..planner.batches.batch_profile import BatchProfile, load_profile, save_profile
from ..profiling.device_profiler import device_name
from ..profiling.rank_profiler import ModelDescription


def caps_below(profile: BatchProfile, cap: int) -> tuple[int, bool] | None:
    """Smallest limit below ``cap`` that ``profile`` sets though memory does not, if any; True if the search set it.
    Measuring again removes that; otherwise someone has lowered it, or there was no search."""
    found = []
    for kind in {profile.kinds[index] for index in set(profile.ranks)}:
        if not kind.memory_bound and 0 < kind.max_batch < cap:
            by_search = kind.searched_batch is not None and kind.max_batch >= kind.searched_batch
            found.append((kind.max_batch, by_search))
    return min(found) if found else None


def device_names(replica_of: Sequence[int]) -> list[str]:
    """Devices by replica; names of several ranks are joined. Every rank calls it."""
    everyone = of_every_rank(device_name(get_accelerator().get_current_device()))
    devices = [""] * (max(replica_of) + 1)
    for device, replica in zip(everyone, replica_of, strict=True):
        devices[replica] = f"{devices[replica]} + {device}" if devices[replica] else device
    return devices


class ProfileFile:
    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def read(
        self, replica_of: Sequence[int], description: ModelDescription, stage: int, precision: str, cap: int
    ) -> BatchProfile | None:
        """The checked profile; None if it does not exist or its search ended below ``cap``. Every rank calls it."""
        found = of_every_rank(self.path.exists())
        devices = device_names(replica_of)
        if not any(found):
            return None
        missing = [rank for rank, exists in enumerate(found) if not exists]
        if missing:
            raise ValueError(f"profile={str(self.path)!r} does not exist on ranks {missing}; copy it to their machines")
        profile = from_rank_0(lambda: load_profile(self.path))
        profile.check_fits(devices, description.digest, stage=stage, precision=precision)
        capped = caps_below(profile, cap)
        if capped is None:
            return profile
        largest, by_search = capped
        if by_search:
            print_on_rank_0(
                f"the profile {self.path} was made with micro-batches of at most {largest} samples; it is made again, "
                f"with at most {cap}"
            )
            return None
        print_on_rank_0(
            f"the profile {self.path} limits micro-batches to {largest} samples, though memory does not; remove the "
            "file to measure again"
        )
        return profile

    def check_writable(self) -> None:
        """Check whether rank 0 can write the file. Every rank calls it."""
        try:
            from_rank_0(lambda: check_writable(self.path))
        except ValueError as error:
            raise ValueError(f"profile={str(self.path)!r} cannot be written: {error}") from None

    def write(self, profile: BatchProfile) -> None:
        """Write the profile on rank 0, with links that a user added to the file. Every rank calls it."""

        def store() -> None:
            links = profile.links
            with suppress(ValueError):
                links = load_profile(self.path).links
            try:
                save_profile(profile.model_copy(update={"links": links}), self.path)
            except OSError as error:
                raise ValueError(f"profile={str(self.path)!r} cannot be written: {error.strerror}") from error

        from_rank_0(store)


class CachedProfile:
    def __init__(self, folder: str | Path | None, context: Mapping[str, Any]) -> None:
        chosen = default_folder() if folder is None else folder
        key = hashlib.sha256(json.dumps(context, sort_keys=True).encode()).hexdigest()[:16]
        self.path: Path | None = Path(chosen) / f"batches-{key}.json" if chosen else None
        """None if nothing is kept."""

    def read(self) -> BatchProfile | None:
        """The profile that rank 0 finds; None if there is no file, or it is damaged or of another version."""

        def load() -> BatchProfile | None:
            with suppress(ValueError, OSError):
                return None if self.path is None else load_profile(self.path)
            return None

        return from_rank_0(load)

    def write(self, profile: BatchProfile) -> None:
        """Write the profile on rank 0; warn if the folder cannot be written to."""
        if self.path is None or dist.get_rank() != 0:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_profile(profile, self.path)
        except OSError as error:
            warnings.warn(
                f"the profile of batches cannot be kept in {self.path.parent} ({error}); it is measured again in every "
                "run. Set profile_cache to a folder that can be written to, or to '' for none",
                stacklevel=2,
            )


def context_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: Any,
    description: ModelDescription,
    **settings: Any,
) -> dict[str, Any]:
    """Everything that the measurement depends on, as JSON values; the same on all ranks, which call it."""
    device = get_accelerator().get_current_device()
    own = (device_name(device), torch.get_num_threads(), os.cpu_count(), _tensors_in_words(samples))
    everyone = of_every_rank(own)
    # As transformers and timm call it.
    flags = ("gradient_checkpointing", "grad_checkpointing")
    recomputes = [
        name for name, module in model.named_modules() if any(getattr(module, flag, False) is True for flag in flags)
    ]
    groups = [
        {name: repr(value) for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
        for group in optimizer.param_groups
    ]
    modules = f"{model!r} {recomputes} {type(optimizer).__name__} {groups}"
    return {
        **settings,
        "model": [description.name, description.digest, hashlib.sha256(modules.encode()).hexdigest()[:16]],
        "ranks": [list(each) for each in everyone],
        "torch": torch.__version__,
        "backend": dist.get_backend(),
    }


def _tensors_in_words(values: Any) -> str:
    if isinstance(values, torch.Tensor):
        return f"{list(values.shape)} {values.dtype}"
    if isinstance(values, Mapping):
        return f"{{{', '.join(f'{key}: {_tensors_in_words(value)}' for key, value in values.items())}}}"
    if isinstance(values, (list, tuple)):
        return f"[{', '.join(map(_tensors_in_words, values))}]"
    return type(values).__name__
