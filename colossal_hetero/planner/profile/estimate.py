"""Profile of a GPT, estimated from its sizes and the nominal speeds of GPUs, to plan before there are machines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..cluster.topology import DeviceKind
from .layer_profile import LayerSizes, LayerTimes, ModelProfile

# Parameters and operations of a GPT: Holmes, Eq. 5 and 6 (Narayanan et al., "Efficient large-scale language model
# training on GPU clusters using Megatron-LM", 2021, Eq. 2 and 3); activation memory: Korthikanti et al., "Reducing
# activation recomputation in large transformer models", 2022, sections 4.1 to 5. FLOP are those of matrix products, a
# tight bound.


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder-only transformer whose MLP is four times as wide as its hidden state, with tied embeddings."""

    layers: int
    hidden: int
    vocabulary: int
    sequence: int
    heads: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}")

    @property
    def block_parameters(self) -> int:
        """Parameters of a block: attention and MLP with their biases, and two layer norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def block_forward_flop(self) -> int:
        """FLOP of one sample in one block, forward: ``24 s h² + 4 s² h``."""
        return 24 * self.sequence * self.hidden**2 + 4 * self.sequence**2 * self.hidden

    @property
    def head_forward_flop(self) -> int:
        """FLOP of one sample in the logits, forward: ``2 s h V``."""
        return 2 * self.sequence * self.hidden * self.vocabulary

    def block_activation_bytes(self, tensor_parallel: int = 1) -> float:
        """Bytes that one sample keeps for backward in one block, per device, in half precision:
        ``s h (10 + 24/t + 5 a s/(h t))`` (Korthikanti et al., Table 2)."""
        if self.heads % tensor_parallel:
            raise ValueError(f"tensor_parallel={tensor_parallel} does not divide heads={self.heads}")
        row = self.sequence * self.hidden
        return row * (10.0 + (24.0 + 5.0 * self.heads * self.sequence / self.hidden) / tensor_parallel)


EFFICIENCY = 0.4
"""Share of nominal FLOP/s. Large models on A100 reach 0.44 to 0.52 (Narayanan et al. 2021, Table 1), others less."""

PARAMETER_BYTES, STATE_FACTOR = 2, 9.0
"""In half precision, Adam has 16 bytes of state per parameter (Rajbhandari et al., ZeRO, 2020, section 3.1), and 2 more
in its step, for which Colossal-AI converts gradients to single precision."""


def estimated_profile(
    model: Transformer,
    devices: Sequence[DeviceKind],
    *,
    efficiency: float | Mapping[str, float] = EFFICIENCY,
    micro_batches: Sequence[int] = (1, 2, 4, 8),
    tensor_parallel: Sequence[int] = (1,),
) -> ModelProfile:
    """Profile in which times are FLOP divided by achieved FLOP/s, and memory is that of half precision with Adam.

    It compares kinds of devices and does not predict seconds: the update takes no time, and a micro-batch of one sample
    is as efficient as a large one. Communication of tensor parallelism is added when the links are known
    (:func:`.on_links`): per block, two sums of its outputs in each pass (Shoeybi et al., Megatron-LM, 2019, figure 4),
    and one each for the embedding's output and the head's input.
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
        if min(values, default=0) < 1:
            raise ValueError(f"{what}={tuple(values)}; give numbers of at least 1")
    each = ", ".join(f"{share:g} ({name})" for name, share in reached.items())
    words = each if len(set(reached.values())) > 1 else f"{next(iter(reached.values())):g}"
    return ModelProfile(
        name=f"gpt-{model.layers}x{model.hidden}",
        precision="bf16",
        state_factor=STATE_FACTOR,
        source=f"estimated from FLOP at {words} of nominal FLOP/s",
        times=tuple(
            _times(model, device, degree, size, reached[device.name])
            for device in devices
            for degree in sorted(set(tensor_parallel))
            for size in sorted(set(micro_batches))
        ),
        sizes=tuple(_sizes(model, degree) for degree in sorted(set(tensor_parallel))),
    )


def _times(model: Transformer, device: DeviceKind, degree: int, size: int, efficiency: float) -> LayerTimes:
    share = size / (device.flops * efficiency * degree)
    forward = [0, *[model.block_forward_flop] * model.layers, model.head_forward_flop]
    return LayerTimes(
        device=device.name,
        tensor_parallel=degree,
        micro_batch=size,
        forward_seconds=tuple(share * flop for flop in forward),
        backward_seconds=tuple(2 * share * flop for flop in forward),
        update_seconds=(0.0,) * (model.layers + 2),
    )


def _sizes(model: Transformer, degree: int) -> LayerSizes:
    row, words = model.sequence * model.hidden, model.vocabulary * model.hidden
    # The logits have the parameters of the word embedding; they are copied if the last stage is not the first.
    parameters = [words + row, *[model.block_parameters] * model.layers, words]
    # The embedding keeps a dropout mask (Korthikanti et al., section 4.3), the head the final norm, the input of the
    # logits and the logits in fp32: 4 s h (1 + V/(h t)).
    head = 4.0 * model.sequence * (model.hidden + model.vocabulary / degree)
    activations = [row, *[model.block_activation_bytes(degree)] * model.layers, head]
    return LayerSizes(
        tensor_parallel=degree,
        parameter_bytes=tuple(math.ceil(PARAMETER_BYTES * count / degree) for count in parameters),
        activation_bytes=tuple(math.ceil(each) for each in activations),
        # A block sends its output of one sample in half precision.
        output_bytes=(*[2 * row] * (model.layers + 1), 0),
        forward_sums=() if degree == 1 else (1, *[2] * model.layers, 0),
        backward_sums=() if degree == 1 else (0, *[2] * model.layers, 1),
    )


IMAGE_SIZE = 32  # pixels of CIFAR-10's images, each way


@dataclass(frozen=True, kw_only=True)
class VitSizes:
    """A vision transformer whose MLP is four times as wide as its embedding."""

    hidden: int
    depth: int
    heads: int
    patch: int


VITS: Mapping[str, VitSizes] = {
    "vit-1b": VitSizes(hidden=2048, depth=24, heads=32, patch=4),
    "vit-3b": VitSizes(hidden=3072, depth=24, heads=48, patch=4),
}
"""ViT-1B: 1.2 billion parameters, 64 patches (Sec. II-B). Of ViT-3B the paper gives only 2.7 billion parameters, as
with depth 24 and hidden 3072. It does not give the heads; here they are 64 wide, as in ViT-Base."""
