"""Tensors of a model in one process: names, shapes and layers, noted before a plugin divides the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp._common_utils import clean_tensor_name

from ..profiling.model_layers import find_block_row
from ..profiling.preserved_state import inner_optimizer

FIRST, LAST = "embedding", "head"


@dataclass(frozen=True, eq=False)
class ModelOutline:
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each parameter and persistent buffer, in the order of the model. Tied parameters occur once."""
    layers: Mapping[str, str]  # layer of each of them: ``embedding``, ``block-0000`` and so on, ``head``
    names: Mapping[str, str]
    """The name that counts, by each name of a tensor: a tied parameter has several, and the first one counts."""
    tied: frozenset[str]
    groups: tuple[tuple[str, ...], ...]
    """Names of the parameters in each group of the optimizer; empty without an optimizer."""
    trained: frozenset[str]  # names of the optimizer's parameters that are not frozen

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the tensors that have elements: no piece, and so no file, has others."""
        return tuple(name for name, shape in self.shapes.items() if 0 not in shape)


def outline_of(model: nn.Module, optimizer: Any = None) -> ModelOutline:
    layer_of = _layers(model)
    shapes: dict[str, tuple[int, ...]] = {}
    layers: dict[str, str] = {}
    names: dict[str, str] = {}
    first: dict[int, str] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for own_name, tensor in (*module._parameters.items(), *persistent_buffers(module)):
            if tensor is None:
                continue
            name = plain_name(f"{module_name}.{own_name}" if module_name else own_name)
            names[name] = first.setdefault(id(tensor), name)
            if names[name] == name:
                shapes[name] = tuple(tensor.shape)
                layers[name] = layer_of[module_name]
    groups: list[tuple[str, ...]] = []
    trained: set[str] = set()
    for group in [] if optimizer is None else inner_optimizer(optimizer).param_groups:
        others = sum(id(parameter) not in first for parameter in group["params"])
        if others:
            raise ValueError(
                f"{others} parameters of the optimizer are not in the model, so that a layer checkpoint cannot name "
                "them; make them part of the model, for example of a module with the model and the criterion"
            )
        groups.append(tuple(first[id(parameter)] for parameter in group["params"]))
        trained |= {first[id(parameter)] for parameter in group["params"] if parameter.requires_grad}
    tied = frozenset(first for name, first in names.items() if name != first)
    return ModelOutline(shapes, layers, names, tied, tuple(groups), frozenset(trained))


def plain_name(name: str) -> str:
    """The name of a tensor without the parts that activation checkpointing and ``torch.compile`` insert."""
    return clean_tensor_name(name).replace("_orig_mod.", "")


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _layers(model: nn.Module) -> dict[str, str]:
    """Layer of each module, by name. Without one clear row of blocks, it is each element of each list of modules."""
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    try:
        row = find_block_row(model).name
    except ValueError:
        return {name: _numbered_part(name) for name in modules}
    layers: dict[str, str] = {}
    passed = False
    for name in modules:
        if name.startswith(f"{row}."):
            passed = True
            layers[name] = f"block-{int(name.removeprefix(f'{row}.').split('.')[0]):04d}"
        else:
            layers[name] = LAST if passed else FIRST
    return layers


def _numbered_part(module: str) -> str:
    """The name of a module up to its first number, e.g. ``decoder-block-3`` of ``decoder.block.3.layer.0``."""
    parts = module.split(".")
    stop = next((place + 1 for place, part in enumerate(parts) if part.isdecimal()), len(parts))
    return "-".join(parts[:stop]) or FIRST
