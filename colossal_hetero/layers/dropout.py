"""Random numbers in training that must not depend on who computes, nor on how often.

Masks of dropout inside a block depend on the unit (docs/algorithms.md, 1.5). Fused attention draws in a kernel, so it
is called once for each unit. On a GPU of another model the same seed gives another mask. If a rank prunes units, its
kept ones count as first.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from colossalai.shardformer.layer import DropoutForParallelInput, DropoutForReplicatedInput
from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .unit_layout import UnitRange
from .workload import uncompiled

MAX_GROUPS = 16
"""Maximum number of draws for a rank's mask. A rank that computes a part of a group of units draws the whole group."""


class UnitDropout(TorchFunctionMode):
    """Replaces dropout between the products of the block ``name``, in training. ``units`` is the number that each rank
    owns; activations count them along ``dim``: -1 for neurons ``[..., H]``, -3 for heads ``[..., H, queries, keys]``,
    of a size that is a multiple of the units. ``computed`` returns the units of the current pass in order."""

    def __init__(self, name: str, units: int, dim: int, computed: Callable[[], Sequence[UnitRange]]) -> None:
        super().__init__()
        self._name, self._units, self._dim, self._computed = name, units, dim, computed
        self._block = zlib.crc32(name.encode())
        self._group = -(-units // MAX_GROUPS)
        self._key, self._calls, self._inside = 0, 0, False
        self._first: nn.Module | None = None

    @contextmanager
    @torch.compiler.disable(recursive=False)
    def between(self, first: nn.Module, last: nn.Module) -> Iterator[None]:
        """Be active in a pass, from the output of ``first`` to the input of ``last``."""
        self._key = int(torch.randint(2**62, (), device="cpu"))
        self._calls, self._first = 0, first
        try:
            # Hooks only now: they take each pass of a layer some microseconds.
            with first.register_forward_hook(self._pass_by), last.register_forward_pre_hook(self._pass_by), self:
                yield
        finally:
            self._inside = False

    @uncompiled
    def _pass_by(self, layer: nn.Module, *_: Any) -> None:
        self._inside = layer is self._first

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside and func is F.dropout:
            return self._dropout(*args, **kwargs)
        if self._inside and func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        size = self._size_of_unit(input)
        self._calls += 1
        generator = torch.Generator(input.device)
        parts = [part for units in self._computed() for part in self._masks(units, input, size, 1 - p, generator)]
        mask = torch.cat(parts, self._dim)
        scale = 0.0 if p == 1.0 else 1 / (1 - p)
        return input.mul_(mask).mul_(scale) if inplace else (input * mask).mul_(scale)

    def _masks(
        self, units: UnitRange, like: Tensor, size: int, keep: float, generator: torch.Generator
    ) -> Iterator[Tensor]:
        """The masks of ``units`` as parts along the units' dimension, bool; each element is True with ``keep``."""
        shape = list(like.shape)
        for first in range(units.start - units.start % self._group, units.stop, self._group):
            last = min(first + self._group, self._units)
            shape[self._dim] = (last - first) * size
            generator.manual_seed(self._seed(units.owner, first))
            mask = torch.empty(shape, dtype=torch.bool, device=like.device).bernoulli_(keep, generator=generator)
            start, stop = max(units.start, first), min(units.stop, last)
            yield mask.narrow(self._dim, (start - first) * size, (stop - start) * size)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if dropout_p == 0.0:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, *args, **kwargs)
        numbers = [(owner, unit) for owner, start, stop in self._computed() for unit in range(start, stop)]
        self._size_of_unit(query)
        self._calls += 1
        heads, outputs = query.shape[self._dim], []

        def split(tensor: Tensor) -> Sequence[Tensor]:
            return tensor.chunk(len(numbers), self._dim)

        masks: Sequence[Tensor | None] = [attn_mask] * len(numbers)
        if attn_mask is not None and attn_mask.dim() >= -self._dim and attn_mask.shape[self._dim] == heads > 1:
            masks = split(attn_mask)
        with _forked_random_state():
            for number, q, k, v, mask in zip(numbers, split(query), split(key), split(value), masks, strict=True):
                _seed(self._seed(*number))
                outputs.append(F.scaled_dot_product_attention(q, k, v, mask, dropout_p, *args, **kwargs))
        return torch.cat(outputs, self._dim)

    def _size_of_unit(self, activations: Tensor) -> int:
        count = sum(stop - start for _, start, stop in self._computed())
        size, rest = divmod(activations.shape[self._dim], count)
        if rest:
            raise RuntimeError(
                f"dropout inside {self._name} has an input of shape {list(activations.shape)}; dimension {self._dim} "
                f"must be a multiple of the {count} units that this rank computes"
            )
        return size

    def _seed(self, owner: int, number: int) -> int:
        # Python's hash of integers is the same in all processes.
        return hash((self._key, self._block, self._calls, owner, number)) % 2**63


# Dropout on activations that every rank of a tensor-parallel group holds in full. Colossal-AI's policies for BERT,
# BLIP-2, GPT-2, GPT-J and T5 draw it separately on each rank (``DropoutForParallelInput``). Then a unit gives another
# result on another rank, and parameters that all ranks hold get different gradients.

_RESIDUAL = {
    "dropout": {
        *("BertForMultipleChoice", "BertForSequenceClassification", "BertForTokenClassification", "BertOutput"),
        *("BertSelfOutput", "Blip2QFormerModel", "Blip2QFormerOutput", "Blip2QFormerSelfOutput", "GPT2MLP", "GPTJMLP"),
        *("GPT2ForTokenClassification", "T5ForTokenClassification", "T5LayerCrossAttention", "T5LayerFF"),
        *("T5LayerSelfAttention", "T5Stack"),
    },
    "resid_dropout": {"GPT2Attention", "GPTJAttention"},
    "drop": {"GPT2Model", "GPTJModel"},
}
"""Classes of ``transformers`` by the attribute that holds such dropout."""


def draw_residual_dropout_equally(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let all ranks of the tensor-parallel ``group`` draw the masks of such dropout that its first rank draws."""
    for module in model.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        for name, holders in _RESIDUAL.items():
            dropout = getattr(module, name, None)
            if isinstance(dropout, DropoutForParallelInput) and kinds & holders:
                # Colossal-AI adds the rank to the seed.
                dropout.randomizer = Randomizer(dropout.randomizer.seed - dist.get_rank(group))
                dropout.__class__ = DropoutForReplicatedInput


# ``torch.utils.checkpoint`` restores torch's random state before it repeats a pass, but not that of Colossal-AI's
# dropout layers (``Randomizer``). With other masks, gradients would belong to no pass at all.


def randomizers_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Randomizer]]:
    return [(module, value) for module in modules for value in vars(module).values() if isinstance(value, Randomizer)]


def repeated_dropout(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a forward pass that begins now, and of its repetition: ``context_fn`` of torch's ``checkpoint``."""
    # A randomizer replaces the tensors of its state, and does not change them.
    before = [(each, vars(each).copy()) for _, each in randomizers_of(module.modules())]
    return nullcontext(), _as_before(before)


@contextmanager
def _as_before(before: list[tuple[Randomizer, dict[str, Any]]]) -> Iterator[None]:
    now = [(randomizer, vars(randomizer).copy()) for randomizer, _ in before]
    try:
        for randomizer, state in before:
            vars(randomizer).update(state)
        yield
    finally:
        for randomizer, state in now:
            vars(randomizer).update(state)


# Random numbers of training passes that depend on the step, the micro-batch and the block alone (docs/elastic.md). When
# activation checkpointing repeats a block, other micro-batches have begun. It first restores the random state from
# before the block, so the micro-batch's seed is read from it.

AFTER_BLOCKS = 1
"""Added to a micro-batch's even seed after a block, so that dropout after all blocks differs from that before them."""


class SeededPasses:
    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], group_rank: int) -> None:
        self._group_rank = group_rank
        self._seed_of: Callable[[int], int] | None = None
        self._passes = 0
        self._inside = 0
        self._seeded: list[Tensor] = []
        self.draws = False  # True if a block of the model has drawn random numbers
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
        with _forked_random_state():
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


def _generators() -> list[torch.Generator]:
    """Those of the host and of this process's GPU, faster than ``torch.manual_seed`` by more than a small block."""
    on_gpu = torch.cuda.is_initialized()
    return [torch.default_generator, *([torch.cuda.default_generators[torch.cuda.current_device()]] if on_gpu else [])]


def _forked_random_state() -> AbstractContextManager[None]:
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else [])


def _seed(seed: int) -> None:
    for generator in _generators():
        generator.manual_seed(seed)


def _states() -> list[Tensor]:
    return [generator.get_state() for generator in _generators()]


def _randomizers(modules: Iterable[nn.Module]) -> list[tuple[Randomizer, bool]]:
    """Random states of Colossal-AI's dropout in ``modules``, each with whether it differs between ranks."""
    return [(each, isinstance(module, DropoutForParallelInput)) for module, each in randomizers_of(modules)]


def _mixed(*numbers: int) -> int:
    # Python's hash of integers is the same in all processes.
    return hash(numbers) % 2**62
