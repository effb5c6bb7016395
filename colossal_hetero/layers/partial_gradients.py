"""Sums of the gradients of tensors that all ranks have whole and use where features are divided over the ranks, such as
a temperature, or a norm that all heads share: each rank gets its gradient from its own features alone. Outputs of
parallel layers are marked in autograd's graph as divided or whole. In front of a row-parallel layer the graph is
searched for operations on something divided that also take something whole, whose gradients are summed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from colossalai.shardformer.layer import Embedding1D, VocabParallelEmbedding1D
from torch import Tensor, nn

from ..colossalai_support.corrections import is_sharded
from .linear import HETERO_LAYERS

_ROW: Any = tuple(theirs for theirs, ours in HETERO_LAYERS.items() if not ours.column_parallel)
_COLUMN: Any = tuple(theirs for theirs, ours in HETERO_LAYERS.items() if ours.column_parallel)
_EMBEDDING = (Embedding1D, VocabParallelEmbedding1D)

_DIVIDED, _SUMMED = "output is divided", "gradients are summed"
"""Keys in the metadata of nodes of the graph."""
Shapes = Mapping[str, torch.Size]


def shapes_of(model: nn.Module) -> Shapes:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def sum_partial_gradients(model: nn.Module, shapes: Shapes) -> None:
    """Let gradients of the sharded ``model`` be summed where that is needed; ``shapes`` are those before sharding."""
    layers: dict[str, Any] = {name: each for name, each in model.named_modules() if isinstance(each, _ROW + _COLUMN)}
    rows = [name for name, layer in layers.items() if isinstance(layer, _ROW) and layer.parallel_input]
    parameters = list(model.named_parameters())
    divided = {
        id(parameter)
        for name, parameter in parameters
        if is_sharded(parameter) or parameter.shape != shapes.get(name, parameter.shape)
    }
    always: set[str] = set()
    beside: dict[str, list[nn.Parameter]] = defaultdict(list)
    for row in rows:
        holder, columns = _holder(row, [name for name, layer in layers.items() if isinstance(layer, _COLUMN)])
        others = {
            name: each
            for name, each in parameters
            if id(each) not in divided and _is_in(name, holder) and not _is_in(name, row)
        }
        if others:
            always.add(row)
        for column in columns:
            beside[column] += others.values()
        features = _sizes(row, layers, shapes, is_divided=True)
        features -= {size for name in (row, *columns) for size in _sizes(name, layers, shapes, is_divided=False)}
        for name, parameter in others.items():
            if wrong := features.intersection(parameter.shape):
                raise ValueError(
                    f"{name} has an element for each of the {wrong.pop()} features before {row}, which tensor "
                    "parallelism divides over the ranks; use one value for all of them (num_parameters=1 of PReLU), or "
                    "tp_size=1"
                )
    if not rows or dist.get_world_size(layers[rows[0]].process_group) == 1:
        return
    search = _WholeInputs(divided, always, beside, len(rows))
    for name, module in model.named_modules():
        if isinstance(module, (*_ROW, *_COLUMN, *_EMBEDDING)):
            search.watch(name, module)


def _holder(row: str, columns: Sequence[str]) -> tuple[str, list[str]]:
    holder, found = row, list[str]()
    while holder and not found:
        holder = holder.rpartition(".")[0]
        found = [name for name in columns if _is_in(name, holder)]
    return holder, found


def _is_in(name: str, holder: str) -> bool:
    return not holder or name.startswith(f"{holder}.")


def _sizes(name: str, layers: Mapping[str, Any], shapes: Shapes, is_divided: bool) -> set[int]:
    whole = shapes.get(f"{name}.weight", ())
    return {size for size, own in zip(whole, layers[name].weight.shape, strict=False) if (size != own) == is_divided}


class _WholeInputs:
    def __init__(
        self, divided: set[int], always: set[str], beside: Mapping[str, Sequence[nn.Parameter]], rows: int
    ) -> None:
        self._divided = divided
        self._always = always
        self._beside = beside
        self._done: set[str] = set()
        self._rows = rows
        self._handles: list[Any] = []

    def watch(self, name: str, module: Any) -> None:
        is_row = isinstance(module, _ROW)
        is_divided = not (isinstance(module, VocabParallelEmbedding1D) or getattr(module, "gather_output", is_row))

        @torch.compiler.disable
        def mark(_: nn.Module, __: Any, output: Any) -> Any:
            first, *rest = output if isinstance(output, tuple) else (output,)
            others = self._beside.get(name, ())
            is_start = first.grad_fn is None and torch.is_grad_enabled() and any(each.requires_grad for each in others)
            if is_start:
                # Of frozen layers, in front of parameters that are trained.
                first = _Start.apply(first, torch.zeros((), requires_grad=True))
            if first.grad_fn is not None:
                first.grad_fn.metadata[_DIVIDED] = is_divided
            if is_start:
                return (first, *rest) if isinstance(output, tuple) else first
            return output

        @torch.compiler.disable
        def search(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if name not in self._done and inputs[0].grad_fn is not None:
                self._search(name, module, inputs[0].grad_fn)

        self._handles.append(module.register_forward_hook(mark))
        if is_row and module.parallel_input:
            self._handles.append(module.register_forward_pre_hook(search))

    def _search(self, name: str, row: Any, start: Any) -> None:
        divided = self._divided_nodes(start, name)
        whole: dict[Any, dict[int, torch.Size]] = defaultdict(dict)
        for node, is_divided in divided.items():
            if is_divided and _DIVIDED not in node.metadata:
                for number, (below, place) in enumerate(node.next_functions):
                    if below is not None and not divided[below]:
                        whole[node][number] = below._input_metadata[place].shape
        for node, inputs in whole.items():
            if _SUMMED not in node.metadata:
                node.metadata[_SUMMED] = True
                node.register_hook(_summing(row, inputs))
        if whole:
            self._always.add(name)
        if name not in self._always:
            self._done.add(name)
            if len(self._done) == self._rows:
                for handle in self._handles:
                    handle.remove()

    def _divided_nodes(self, start: Any, name: str) -> dict[Any, bool]:
        """Nodes of the graph back to the parallel layers before, each with whether its output is divided."""
        found: dict[Any, bool] = {}
        stack = [start]
        while stack:
            node = stack[-1]
            if node not in found:
                below = [each for each, _ in node.next_functions if each is not None]
                if _DIVIDED in node.metadata:
                    found[node] = node.metadata[_DIVIDED]
                elif type(node).__name__ == "AccumulateGrad":
                    found[node] = self._is_divided(node.variable, name)
                elif unknown := [each for each in below if each not in found]:
                    stack += unknown
                    continue
                else:
                    found[node] = any(found[each] for each in below)
            stack.pop()
        return found

    def _is_divided(self, leaf: Tensor, name: str) -> bool:
        if not isinstance(leaf, nn.Parameter) and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"a reentrant activation checkpoint hides what gradients have to be summed over ranks before {name}: "
                "it begins between parallel layers, or it is given a tensor with gradients beside its input, as T5's "
                "position_bias; checkpoint with use_reentrant=False "
                "(transformers: gradient_checkpointing_kwargs={'use_reentrant': False})"
            )
        return id(leaf) in self._divided


class _Start(torch.autograd.Function):
    """Gives a tensor without gradients a node in the graph, which ends the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, _: Tensor) -> Tensor:
        return tensor.detach()  # not a view that may not be changed in place

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        return None, None


def _summing(row: Any, shapes: Mapping[int, torch.Size]) -> Callable:
    """A hook that sums gradients of a node over the ranks of ``row``; ``shapes`` are by the number of the gradient."""

    def total(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        result = list(gradients)
        clock = getattr(row, "clock", None)
        if clock is not None:
            clock.mark("block", row.kind)
        for number, shape in shapes.items():
            gradient = result[number]
            if gradient is not None:
                gradient = gradient.sum_to_size(shape).clone(memory_format=torch.contiguous_format)
                dist.all_reduce(gradient, group=row.process_group)
                result[number] = gradient
        if clock is not None:
            clock.mark("communication", row.kind)
        return tuple(result)

    return total
