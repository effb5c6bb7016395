"""Dropout with tensor parallelism: random numbers that a rank draws inside a block must not change those that all ranks
draw equally afterwards, and what all ranks hold in full must get the same mask on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from colossalai.shardformer.layer import DropoutForParallelInput, DropoutForReplicatedInput
from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor, nn

from .workload import uncompiled

# Dropout inside of a block -------------------------------------------------------------------------------------------
# Ranks that compute different numbers of units draw differently many random numbers. So what is drawn there comes from
# a state of its own, whose seed is drawn on the host from torch's random state: the ranks of a group share that state,
# and activation checkpointing restores it before it repeats a pass.


@contextmanager
@torch.compiler.disable(recursive=False)
def separate_random_numbers(first: Any, last: nn.Module) -> Iterator[None]:
    """In the block, draw by a seed of the pass from the output of the layer ``first`` to the input of ``last``."""
    seed = int(torch.randint(2**62, (), device="cpu"))
    inside = ExitStack()

    @uncompiled
    def begin(*_: Any) -> None:
        inside.enter_context(_seeded(first.weight.device, seed))

    @uncompiled
    def end(*_: Any) -> None:
        inside.close()

    try:
        # Hooks only now: they take each pass of a layer some microseconds.
        with first.register_forward_hook(begin), last.register_forward_pre_hook(end):
            yield
    finally:
        inside.close()


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    if device.type == "cpu":
        generator = torch.default_generator
    else:
        backend = getattr(torch, device.type)
        generator = backend.default_generators[backend.current_device() if device.index is None else device.index]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


# Residual dropout ----------------------------------------------------------------------------------------------------
# Dropout on activations that every rank of a tensor-parallel group holds in full. Colossal-AI's policies for BERT,
# BLIP-2, GPT-2, GPT-J and T5 draw it separately on each rank (``DropoutForParallelInput``). Then a unit gives another
# result on another rank, and parameters that all ranks hold get different gradients.

_RESIDUAL: dict[str, tuple[str, ...]] = {
    "BertForMultipleChoice": ("dropout",),
    "BertForSequenceClassification": ("dropout",),
    "BertForTokenClassification": ("dropout",),
    "BertOutput": ("dropout",),
    "BertSelfOutput": ("dropout",),
    "Blip2QFormerModel": ("dropout",),
    "Blip2QFormerOutput": ("dropout",),
    "Blip2QFormerSelfOutput": ("dropout",),
    "GPT2Attention": ("resid_dropout",),
    "GPT2ForTokenClassification": ("dropout",),
    "GPT2MLP": ("dropout",),
    "GPT2Model": ("drop",),
    "GPTJAttention": ("resid_dropout",),
    "GPTJMLP": ("dropout",),
    "GPTJModel": ("drop",),
    "T5ForTokenClassification": ("dropout",),
    "T5LayerCrossAttention": ("dropout",),
    "T5LayerFF": ("dropout",),
    "T5LayerSelfAttention": ("dropout",),
    "T5Stack": ("dropout",),
}
"""Attributes that hold such dropout, by the class of ``transformers``."""


def draw_residual_dropout_equally(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let all ranks of the tensor-parallel ``group`` draw the masks of such dropout that its first rank draws."""
    for module in model.modules():
        names = {name for kind in type(module).__mro__ for name in _RESIDUAL.get(kind.__name__, ())}
        for dropout in (getattr(module, name, None) for name in sorted(names)):
            if isinstance(dropout, DropoutForParallelInput):
                # Colossal-AI adds the rank to the seed.
                dropout.randomizer = Randomizer(dropout.randomizer.seed - dist.get_rank(group))
                dropout.__class__ = DropoutForReplicatedInput


# Repeated dropout ----------------------------------------------------------------------------------------------------
# ``torch.utils.checkpoint`` restores torch's random state before it repeats a pass, but not that of Colossal-AI's
# dropout layers (``Randomizer``). With other masks, gradients would belong to no pass at all.


def randomizers_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Randomizer]]:
    return [(module, value) for module in modules for value in vars(module).values() if isinstance(value, Randomizer)]


def repeated_dropout(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a forward pass that begins now, and of its repetition: ``context_fn`` of torch's ``checkpoint``."""
    # A randomizer replaces the tensors of its state, and does not change them.
    before = [(each, _state(each)) for _, each in randomizers_of(module.modules())]
    return nullcontext(), _as_before(before)


@contextmanager
def _as_before(before: list[tuple[Randomizer, tuple[Tensor, Tensor]]]) -> Iterator[None]:
    now = [(randomizer, _state(randomizer)) for randomizer, _ in before]
    _restore(before)
    try:
        yield
    finally:
        _restore(now)


def _state(randomizer: Randomizer) -> tuple[Tensor, Tensor]:
    return randomizer.device_rng_state, randomizer.cpu_rng_state


def _restore(states: list[tuple[Randomizer, tuple[Tensor, Tensor]]]) -> None:
    for randomizer, (device_state, cpu_state) in states:
        randomizer.device_rng_state, randomizer.cpu_rng_state = device_state, cpu_state
