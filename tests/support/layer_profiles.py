"""Layer times and sizes of which tests make profiles of models by hand."""

from __future__ import annotations

from collections.abc import Sequence

from colossal_hetero.planner.profile.layer_profile import LayerSizes, LayerTimes, ModelProfile


def layer_times(
    device: str,
    forward_seconds: Sequence[float],
    *,
    micro_batch: int = 1,
    tensor_parallel: int = 1,
    update_seconds: Sequence[float] | None = None,
) -> LayerTimes:
    """Times by layer. Backward passes take twice as long as forward passes; updates take no time by default."""
    return LayerTimes(
        device=device,
        tensor_parallel=tensor_parallel,
        micro_batch=micro_batch,
        forward_seconds=tuple(forward_seconds),
        backward_seconds=tuple(2 * each for each in forward_seconds),
        update_seconds=(0.0,) * len(forward_seconds) if update_seconds is None else tuple(update_seconds),
    )


def small_sizes(blocks: int, degrees: Sequence[int], output_bytes: int) -> tuple[LayerSizes, ...]:
    """Sizes by tensor-parallel degree: ``blocks`` blocks of 2 bytes of parameters and 4 bytes of activations per
    sample, divided by the degree, between an embedding and a head that have neither."""
    return tuple(
        LayerSizes(
            tensor_parallel=degree,
            parameter_bytes=(0, *(2 // degree,) * blocks, 0),
            activation_bytes=(0, *(4 // degree,) * blocks, 0),
            output_bytes=(output_bytes,) * (blocks + 2),
            temporary_bytes=(0,) * (blocks + 2),
        )
        for degree in degrees
    )


def times_of(profile: ModelProfile, device: str, tensor_parallel: int, micro_batch: int) -> LayerTimes:
    return next(times for times in profile.times if times.key == (device, tensor_parallel, micro_batch))
