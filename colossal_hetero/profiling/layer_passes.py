"""Run parts of a model separately: some consecutive blocks, or the parts before and after the blocks. One pass through
the model records each block's arguments, with which it is then called for any hidden state. For the other parts, every
block is replaced by a function that returns a stored hidden state at no cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..colossalai_support.accelerator import get_accelerator
from ..layers.chain import Chain
from .model_layers import BlockRow, call_model
from .training_step import default_training_step

GRADIENT_SCALE = 1e-3
"""Scale of the random gradients of a block's output; smaller ones could become denormal, which is slow on CPUs."""


class Duration(NamedTuple):
    wall: float
    cpu: float

    def __add__(self, other: Any) -> Duration:
        return Duration(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: Duration) -> Duration:
        return Duration(self.wall - other.wall, self.cpu - other.cpu)


class EndDurations(NamedTuple):
    before: tuple[Duration, Duration]
    after: tuple[Duration, Duration]


@dataclass
class _Call:
    """The arguments with which the model calls a block, without the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str | None  # name of the argument with the hidden state; None if it is the first positional argument
    output: Any  # output of the block, with None instead of the hidden state


class LayerPasses:
    def __init__(self, model: nn.Module, row: BlockRow, criterion: Callable | None, batch: Any) -> None:
        self._model = model
        self.blocks = row.blocks
        self._criterion = criterion
        self._batch = batch
        self._calls: list[_Call] = []
        self.keeps_shape = not isinstance(model, Chain)
        self._inputs: list[Tensor] = []
        """Input of each block of a chain, whose shapes differ; of other models, that of the first block."""
        self._last: Tensor
        self._capture(row.name)
        self._gradients = [torch.randn_like(each).mul_(GRADIENT_SCALE) for each in (*self._inputs[1:], self._last)]
        self._first_gradient = torch.randn_like(self._inputs[0]).mul_(GRADIENT_SCALE)

    def input_of(self, block: int) -> Tensor:
        """Input of a block. The micro-batch is not necessarily its first dimension."""
        return self._inputs[min(block, len(self._inputs) - 1)]

    def shared_tensors(self) -> list[Tensor]:
        leaves = tree_leaves([(call.args, call.kwargs) for call in self._calls])
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def run(self, start: int, count: int) -> tuple[Duration, Duration]:
        """Durations of forward and backward of ``count`` blocks; gradients are added to those of the parameters."""
        hidden = self.input_of(start).detach().requires_grad_()
        begin = clock()
        output = self.forward(hidden, start, count)
        middle = clock()
        output.backward(self._gradients[min(start + count, len(self._gradients)) - 1])
        return middle - begin, clock() - middle

    def forward(self, hidden: Tensor, start: int, count: int) -> Tensor:
        for index in range(start, start + count):
            hidden = _hidden_of(self._call(index, hidden))
        return hidden

    def ends(self) -> EndDurations:
        ends = self.forward_ends()
        begin = clock()
        ends.loss.backward()
        middle = clock()
        if ends.hidden.requires_grad:
            ends.hidden.backward(self._first_gradient)
        end = clock()
        return EndDurations((ends.before, end - middle), (ends.after, middle - begin))

    def forward_ends(
        self, on_before: Callable[[], Any] = lambda: None, on_after: Callable[[], Any] = lambda: None
    ) -> _Ends:
        """Forward without the blocks; ``on_before`` is called instead of the first one, ``on_after`` after the last."""
        last = self._last.detach().requires_grad_()
        reached: list[Any] = []
        final = len(self.blocks) - 1

        def stand_in(index: int) -> Callable:
            call = self._calls[index]

            def forward(*args: Any, **kwargs: Any) -> Any:
                if index == 0:
                    reached.append(clock())
                    reached.append(kwargs[call.name] if call.name is not None else args[0])
                    on_before()
                if index == final:
                    on_after()
                    reached.append(clock())
                return _with_hidden(call.output, last)

            return forward

        with _forwards(self.blocks, stand_in):
            begin = clock()
            loss = self._loss()
            end = clock()
        return _Ends(loss, reached[1], last, reached[0] - begin, end - reached[2])

    def _loss(self) -> Tensor:
        with _without_cache(self._model):
            return self._loss_of(self._batch)

    def _loss_of(self, batch: Any) -> Tensor:
        if self._criterion is None:
            outputs = call_model(self._model, batch)
            loss = getattr(outputs, "loss", None)
            if isinstance(loss, Tensor):
                return loss
            output = getattr(outputs, "logits", None)
            return _first_tensor(outputs if output is None else output).float().mean()
        return default_training_step(self._model, self._criterion, batch)

    def _call(self, index: int, hidden: Tensor) -> Any:
        call = self._calls[index]
        if call.name is None:
            return self.blocks[index](hidden, *call.args, **call.kwargs)
        return self.blocks[index](*call.args, **call.kwargs, **{call.name: hidden})

    def _capture(self, row: str) -> None:
        found: dict[int, _Call] = {}

        def see(index: int) -> Callable:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                if args and isinstance(args[0], Tensor):
                    hidden, name, args = args[0], None, args[1:]
                else:
                    name = "hidden_states"
                    if not isinstance(kwargs.get(name), Tensor):
                        raise ValueError(f"{row}.{index} is not called with a hidden state first or as hidden_states")
                    hidden = kwargs[name]
                    kwargs = {key: value for key, value in kwargs.items() if key != name}
                result = _hidden_of(output)
                if result.shape != hidden.shape and self.keeps_shape:
                    raise ValueError(
                        f"{row}.{index} changes the shape of the hidden state from {tuple(hidden.shape)} to "
                        f"{tuple(result.shape)}; only blocks that keep it can be profiled"
                    )
                if index == 0 or not self.keeps_shape:
                    self._inputs.append(hidden.detach().clone())
                if index == len(self.blocks) - 1:
                    self._last = result.detach().clone()
                found[index] = _Call(args, kwargs, name, _with_hidden(output, None))

            return hook

        hooks = [block.register_forward_hook(see(index), with_kwargs=True) for index, block in enumerate(self.blocks)]
        try:
            with torch.no_grad():
                self._loss()
        finally:
            for each in hooks:
                each.remove()
        if len(found) != len(self.blocks):
            raise ValueError(f"the model ran {len(found)} of the {len(self.blocks)} blocks in {row}")
        self._calls = [found[index] for index in range(len(self.blocks))]


class _Ends(NamedTuple):
    loss: Tensor
    hidden: Tensor
    last: Tensor  # the stored hidden state that replaces the output of the last block; a leaf tensor
    before: Duration
    after: Duration


def clock() -> Duration:
    """The time now, after the device has finished its work."""
    get_accelerator().synchronize()
    return Duration(time.perf_counter(), time.process_time())


def resized(batch: Any, samples: int) -> Any:
    """The first ``samples`` samples of ``batch`` (the first dimension of all tensors), repeated if it has fewer."""

    def take(part: Any) -> Any:
        if not isinstance(part, Tensor) or part.dim() == 0:
            return part
        return part[torch.arange(samples, device=part.device) % len(part)]

    return tree_map(take, dict(batch) if isinstance(batch, Mapping) else batch)


def _hidden_of(output: Any) -> Tensor:
    hidden = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(hidden, Tensor):
        raise ValueError(f"a block returns {type(output).__name__}; it must return its hidden state, alone or first")
    return hidden


def _with_hidden(output: Any, hidden: Tensor | None) -> Any:
    return type(output)([hidden, *output[1:]]) if isinstance(output, tuple | list) else hidden


def _first_tensor(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    return next(value for value in values if isinstance(value, Tensor))


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """In the block, switch off the key-value cache, which transformers fill in training but Colossal-AI does not."""
    configs = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
    with ExitStack() as stack:
        for config in configs.values():
            if getattr(config, "use_cache", False):
                config.use_cache = False
                stack.callback(setattr, config, "use_cache", True)
        yield


@contextmanager
def _forwards(modules: tuple[nn.Module, ...], stand_in: Callable[[int], Callable]) -> Iterator[None]:
    before = [module.__dict__.get("forward") for module in modules]
    for index, module in enumerate(modules):
        module.__dict__["forward"] = stand_in(index)
    try:
        yield
    finally:
        for module, original in zip(modules, before, strict=True):
            if original is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = original
