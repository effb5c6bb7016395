"""The same dropout in a forward pass that activation checkpointing repeats.

Before it repeats a pass, ``torch.utils.checkpoint`` restores torch's random state. The dropout layers of Colossal-AI's
tensor parallelism do not draw from that: each has a random state of its own (``Randomizer``), which has gone on.
Without :func:`repeated_dropout` the repeated pass would have other masks, and gradients that belong to no pass at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor, nn

__all__ = ["randomizers_of", "repeated_dropout"]


def randomizers_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Randomizer]]:
    """Each dropout layer of Colossal-AI in ``modules``, with its own random state."""
    return [(module, value) for module in modules for value in vars(module).values() if isinstance(value, Randomizer)]


def repeated_dropout(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a forward pass of ``module`` that begins now, and of its repetition: ``context_fn`` of
    ``torch.utils.checkpoint.checkpoint``."""
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
