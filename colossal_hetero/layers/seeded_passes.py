"""Random numbers of training passes that depend on the step, the micro-batch and the block, and on nothing else: at the
beginning of every block torch's generators are seeded with a hash of the micro-batch's seed and the block's name, so
masks are the same wherever a block is computed. When activation checkpointing repeats a block, other micro-batches have
begun. It first restores the random state from before the block, so the micro-batch's seed is read from that state."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from colossalai.shardformer.layer import DropoutForParallelInput
from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor, nn

from .dropout import randomizers_of

AFTER_BLOCKS = 1
"""Added to a micro-batch's even seed after a block, so that dropout after all blocks differs from that before them."""


class SeededPasses:
    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], group_rank: int) -> None:
        self._group_rank = group_rank
        self._seed_of: Callable[[int], int] | None = None
        self._passes = 0
        self._inside = 0
        self._seeded: list[Tensor] = []
        self.draws = False
        """True if a block of the model has drawn random numbers."""
        in_blocks = {id(module) for block in blocks.values() for module in block.modules()}
        outside = [module for module in model.modules() if id(module) not in in_blocks]
        model.register_forward_pre_hook(partial(self._begin_pass, _randomizers(outside)))
        for name, block in blocks.items():
            number = zlib.crc32(name.encode())
            block.register_forward_pre_hook(partial(self._begin_block, number, _randomizers(block.modules())))
            block.register_forward_hook(self._end_block)

    @contextmanager
    def run(self, seed_of: Callable[[int], int]) -> Iterator[None]:
        """Take forward passes of the model in this context for micro-batches 0, 1, 2 and so on of this rank."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices):
            self._seed_of, self._passes = seed_of, 0
            try:
                yield
            finally:
                self._seed_of = None

    @torch.compiler.disable
    def _begin_pass(self, randomizers: Sequence[tuple[Randomizer, bool]], *_: Any) -> None:
        if self._seed_of is not None:
            seed = self._seed_of(self._passes) % 2**61 * 2
            self._passes += 1
            self._reseed(seed, randomizers)

    @torch.compiler.disable
    def _begin_block(self, number: int, randomizers: Sequence[tuple[Randomizer, bool]], *_: Any) -> None:
        if self._seed_of is not None:
            self._inside = torch.initial_seed() & ~AFTER_BLOCKS
            self._reseed(_mixed(self._inside, number), randomizers)
            if not self.draws:
                self._seeded = _states()

    @torch.compiler.disable
    def _end_block(self, *_: Any) -> None:
        if self._seed_of is not None:
            if not self.draws:
                self.draws = not all(map(torch.equal, self._seeded, _states()))
            _seed(self._inside | AFTER_BLOCKS)

    def _reseed(self, seed: int, randomizers: Sequence[tuple[Randomizer, bool]]) -> None:
        for number, (randomizer, differs) in enumerate(randomizers):
            rank = self._group_rank if differs else 0
            vars(randomizer).update(vars(Randomizer(_mixed(seed, number, rank))), seed=randomizer.seed)
        _seed(seed)


def _seed(seed: int) -> None:
    """Seed the generators of the host and of this process's GPU. ``torch.manual_seed`` also notes a stack trace for
    every kind of device that is not in use, which takes longer than a small block."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def _states() -> list[Tensor]:
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.default_generators[torch.cuda.current_device()].get_state())
    return states


def _randomizers(modules: Iterable[nn.Module]) -> list[tuple[Randomizer, bool]]:
    """Random states of Colossal-AI's dropout in ``modules``, each with whether it differs between ranks."""
    return [(each, isinstance(module, DropoutForParallelInput)) for module, each in randomizers_of(modules)]


def _mixed(*numbers: int) -> int:
    # Python's hash of integers is the same in all processes.
    return hash(numbers) % 2**62
