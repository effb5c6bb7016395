"""A profile of layers from the times of the whole model, divided by the operations and parameters of each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..cluster.topology import DeviceKind
from ..profile.estimate import estimated_profile
from ..profile.gpt import Transformer
from ..profile.layer_profile import ModelProfile

__all__ = ["WholeModelTimes", "merged", "profile_of_whole_model"]


class WholeModelTimes(NamedTuple):
    """Seconds of all layers on one device, or on one tensor-parallel group."""

    forward_seconds: float
    """Of one micro-batch."""
    backward_seconds: float
    """Of one micro-batch."""
    update_seconds: float
    """Of the optimizer, once per iteration."""


def profile_of_whole_model(
    model: Transformer,
    device: str,
    times: WholeModelTimes,
    *,
    micro_batch: int,
    tensor_parallel: int = 1,
    source: str,
) -> ModelProfile:
    """The profile of a GPT in half precision, from times of the whole model on one kind of device.

    Passes are divided over the layers in proportion to their floating-point operations, the optimizer's step in
    proportion to their parameters. Sizes are those of :mod:`~colossal_hetero.planner.profile.estimate`, because the
    times say nothing about memory.

    Raises:
        ValueError: A time of forward or backward is not above 0, that of the optimizer is below 0, one is not
            finite, or the degree does not divide the heads.
    """
    for name, value in zip(("forward", "backward"), times, strict=False):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} takes {value} s; it must take more than 0")
    if not 0 <= times.update_seconds < math.inf:
        raise ValueError(f"the optimizer's step takes {times.update_seconds} s; it must take at least 0")
    # Only the shares of the layers matter, so the speed of the device is any.
    kind = DeviceKind(device, 1, 1.0)
    shares = estimated_profile(model, [kind], micro_batches=[micro_batch], tensor_parallel=[tensor_parallel])
    estimated, sizes = shares.times[0], shares.sizes[0]
    changed = {
        "forward_seconds": _divided(times.forward_seconds, estimated.forward_seconds),
        "backward_seconds": _divided(times.backward_seconds, estimated.backward_seconds),
        "update_seconds": _divided(times.update_seconds, sizes.parameter_bytes),
    }
    known = sizes.model_copy(update={"forward_sums": (), "backward_sums": ()})  # the times contain them
    return shares.changed(times=(estimated.model_copy(update=changed),), sizes=(known,), source=source)


def _divided(seconds: float, weights: Sequence[float]) -> tuple[float, ...]:
    return tuple(seconds * weight / sum(weights) for weight in weights)


def merged(profile: ModelProfile, other: ModelProfile) -> ModelProfile:
    """``profile`` with the times of ``other``, of the same model, in addition.

    Raises:
        ValueError: They are of different models, or both have times of a device, degree and micro-batch.
    """
    for what, here, there in (
        ("name", profile.name, other.name),
        ("precision", profile.precision, other.precision),
        ("layers", profile.layers, other.layers),
    ):
        if here != there:
            raise ValueError(f"the profiles are of different models: {what} {here} and {there}")
    known = {each.key for each in profile.times}
    for each in other.times:
        if each.key in known:
            device, degree, size = each.key
            raise ValueError(
                f"the profile has times of {device} at tensor_parallel {degree} with micro-batches of {size} already"
            )
    degrees = {each.tensor_parallel for each in profile.sizes}
    more = tuple(each for each in other.sizes if each.tensor_parallel not in degrees)
    return profile.model_copy(
        update={
            "times": tuple(sorted((*profile.times, *other.times), key=lambda each: each.key)),
            "sizes": tuple(sorted((*profile.sizes, *more), key=lambda each: each.tensor_parallel)),
            "source": f"{profile.source}; {other.source}",
        }
    )
