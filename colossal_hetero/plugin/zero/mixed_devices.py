"""Jobs in which some ranks have a GPU and others a CPU: what they need, and which ZeRO stages can run in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...accelerator import get_accelerator
from ...gpu_over_gloo import is_gpu_over_gloo

__all__ = ["RankDevice", "device_of_this_rank", "stages_for"]

LAST_MIXED_STAGE = 2
"""FSDP (stage 3) gathers parameters in an order that depends on the kind of the device."""


@dataclass(frozen=True)
class RankDevice:
    """The kind of a rank's device, and how its tensors are sent."""

    kind: str
    """Name of the accelerator, such as ``cuda`` or ``cpu``."""
    over_gloo: bool
    """Whether its tensors are sent over Gloo."""


def device_of_this_rank() -> RankDevice:
    """The device of this rank."""
    kind = get_accelerator().name
    return RankDevice(kind, kind == "cpu" or is_gpu_over_gloo())


def stages_for(stages: Sequence[int], devices: Sequence[RankDevice]) -> list[int]:
    """Those of ``stages`` that can run on these devices, which are given by rank.

    Raises:
        ValueError: devices of several kinds do not communicate over Gloo, or none of the stages can run on them.
    """
    kinds = sorted({device.kind for device in devices})
    if len(kinds) == 1:
        return list(stages)
    shown = " and ".join(kinds)
    apart = [rank for rank, device in enumerate(devices) if not device.over_gloo]
    if apart:
        raise ValueError(
            f"the ranks have devices of the kinds {shown}, and rank {apart[0]} does not communicate over Gloo, which "
            'alone connects them; start all ranks with torch.distributed.init_process_group("gloo")'
        )
    possible = [stage for stage in stages if stage <= LAST_MIXED_STAGE]
    if not possible:
        raise ValueError(
            f"stage {stages[0]} needs devices of one kind, but the ranks have {shown}; use stage 0, 1 or 2"
        )
    return possible
