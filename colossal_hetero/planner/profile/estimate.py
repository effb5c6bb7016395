"""Estimates the profile of a GPT from its sizes and the nominal speeds of GPUs, to plan before there are machines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..cluster.topology import DeviceKind
from .gpt import Recompute, Transformer
from .layer_profile import LayerSizes, LayerTimes, ModelProfile

__all__ = ["EFFICIENCY", "estimated_profile"]

EFFICIENCY = 0.4
"""Share of its nominal FLOP/s that a device achieves. Large models on A100 GPUs reach 0.44 to 0.52 (Narayanan et al.
2021, Table 1); smaller models and slower networks reach less."""

PARAMETER_BYTES, STATE_FACTOR = 2, 9.0
"""In half precision with Adam, 16 bytes of state per parameter (Rajbhandari et al., ZeRO, 2020, section 3.1), and 2
more in the optimizer's step, for which Colossal-AI converts gradients to single precision."""


def estimated_profile(
    model: Transformer,
    devices: Sequence[DeviceKind],
    *,
    efficiency: float | Mapping[str, float] = EFFICIENCY,
    micro_batches: Sequence[int] = (1, 2, 4, 8),
    tensor_parallel: Sequence[int] = (1,),
    recompute: Recompute = "none",
    name: str | None = None,
) -> ModelProfile:
    """A profile in which times are FLOP divided by achieved FLOP/s, and memory is that of half precision with Adam.

    In this profile the optimizer's update takes no time, and a micro-batch of one sample is as efficient as a large
    one. It shows how kinds of devices compare; it does not predict seconds. The communication of tensor parallelism is
    counted when the links are known (:mod:`.on_links`): two sums of a layer's outputs per block in a forward pass, and
    as many in a backward pass (Shoeybi et al., Megatron-LM, 2019, figure 4), one of the embedding's and one of the
    head's input.

    Args:
        model: The sizes of the model.
        devices: Kinds of devices, with their nominal FLOP/s.
        efficiency: Share of the nominal FLOP/s that is achieved, above 0 and at most 1; by name of the device, if it
            differs. Devices without one achieve :data:`EFFICIENCY`.
        micro_batches: Sizes in the profile, in samples.
        tensor_parallel: Degrees in the profile.
        recompute: What of a block's forward pass is run again in backward.
        name: Name of the model.

    Raises:
        ValueError: There is no device, a device is given twice, or an argument is out of range.
    """
    shares = efficiency if isinstance(efficiency, Mapping) else {device.name: efficiency for device in devices}
    for share in shares.values():
        if not 0 < share <= 1:
            raise ValueError(f"efficiency={share}; the share of nominal FLOP/s is above 0 and at most 1, e.g. 0.4")
    reached = {device.name: shares.get(device.name, EFFICIENCY) for device in devices}
    unknown = ", ".join(shares.keys() - reached.keys())
    if unknown:
        raise ValueError(
            f"there is an efficiency of {unknown}, but no such device; the devices are {', '.join(reached)}"
        )
    if not devices:
        raise ValueError("no device to estimate for; name at least one kind, e.g. A100-40")
    for what, values in (("micro_batches", micro_batches), ("tensor_parallel", tensor_parallel)):
        if not values or min(values) < 1:
            raise ValueError(f"{what}={tuple(values)}; give numbers of at least 1")
    return ModelProfile(
        name=name or f"gpt-{model.layers}x{model.hidden}",
        precision="bf16",
        state_factor=STATE_FACTOR,
        source=f"estimated from FLOP at {_in_words(reached)} of nominal FLOP/s",
        times=tuple(
            _times(model, device, degree, size, reached[device.name], recompute)
            for device in devices
            for degree in sorted(set(tensor_parallel))
            for size in sorted(set(micro_batches))
        ),
        sizes=tuple(_sizes(model, degree, recompute) for degree in sorted(set(tensor_parallel))),
    )


def _in_words(reached: Mapping[str, float]) -> str:
    if len(set(reached.values())) == 1:
        return f"{next(iter(reached.values())):g}"
    return ", ".join(f"{share:g} ({name})" for name, share in reached.items())


def _times(
    model: Transformer, device: DeviceKind, degree: int, size: int, efficiency: float, recompute: Recompute
) -> LayerTimes:
    share = size / (device.flops * efficiency * degree)
    # Looking up embeddings takes no floating-point operations.
    forward = [0, *[model.block_forward_flop] * model.layers, model.head_forward_flop]
    block_backward = model.block_backward_flop(recompute == "full")
    backward = [0, *[block_backward] * model.layers, 2 * model.head_forward_flop]
    return LayerTimes(
        device=device.name,
        tensor_parallel=degree,
        micro_batch=size,
        forward_seconds=tuple(share * flop for flop in forward),
        backward_seconds=tuple(share * flop for flop in backward),
        update_seconds=(0.0,) * (model.layers + 2),
    )


def _sizes(model: Transformer, degree: int, recompute: Recompute) -> LayerSizes:
    parameters = [model.embedding_parameters, *[model.block_parameters] * model.layers, model.head_parameters]
    activations = [
        model.embedding_activation_bytes,
        *[model.block_activation_bytes(degree, recompute)] * model.layers,
        model.head_activation_bytes(degree),
    ]
    return LayerSizes(
        tensor_parallel=degree,
        parameter_bytes=tuple(math.ceil(PARAMETER_BYTES * count / degree) for count in parameters),
        activation_bytes=tuple(math.ceil(each) for each in activations),
        output_bytes=(*[model.output_bytes] * (model.layers + 1), 0),
        forward_sums=() if degree == 1 else (1, *[2] * model.layers, 0),
        backward_sums=() if degree == 1 else (0, *[4 if recompute == "full" else 2] * model.layers, 1),
    )
