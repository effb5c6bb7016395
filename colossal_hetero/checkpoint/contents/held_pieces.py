"""The pieces of a model and its optimizer that this rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from colossalai.interface import ModelWrapper
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..format.pieces import Box, TensorPiece
from .division import LocalPart, sliced, whole
from .model_outline import ModelOutline, persistent_buffers, plain_name
from .optimizer_memory import NUMBER, PARAMETER, Master, as_scalar, check_stage, masters_of, states_of
from .tensor_parallel import TensorDivision, division_of

__all__ = [
    "HeldTensor",
    "agreed_buffers",
    "bare_model",
    "buffer_pieces",
    "held_parameters",
    "pieces_of",
    "pieces_of_memory",
    "scalar_piece",
]

WHOLE = "whole"
"""Shard of what all ranks of a tensor-parallel group and of a ZeRO group hold."""


class HeldTensor(NamedTuple):
    """A parameter of the model of which this rank has a part."""

    name: str
    """In the model of one process."""
    layer: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    tensor: Tensor
    """The parameter on this rank."""
    division: TensorDivision
    is_tied: bool
    """Whether the model has the parameter in several places: several stages of a pipeline may hold it."""
    master: Master | None
    """What the optimizer updates; None if it does not."""

    def shard(self, division: str) -> str:
        """Name of the shard of the layer that has the parameter's elements of a division.

        A tied parameter has a shard of its own, because a stage may hold it without the rest of the layer.
        """
        return f"{division}.tied" if self.is_tied else division

    @property
    def parts(self) -> tuple[LocalPart, ...]:
        """The parts that the master has, or the parameter if there is none. Local boxes are those of the parameter."""
        if self.master is None or self.master.slices == 1:
            return self.division.parts
        start = self.master.start
        return sliced(self.division.parts, self.tensor.shape, start, start + self.master.tensor.numel())


def bare_model(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of Colossal-AI and torch."""
    while isinstance(model, ModelWrapper | DistributedDataParallel):
        model = model.module
    return model


def pieces_of(model: nn.Module, optimizer: Any, outline: ModelOutline) -> list[TensorPiece]:
    """The pieces of parameters, persistent buffers and the optimizer's state that this rank holds.

    The values of parameters are those that the optimizer updates: masters in higher precision, where there are any.
    Ranks that hold the same box of a tensor have the same piece, apart from buffers whose statistics differ.

    Args:
        model: as a plugin has configured it; ZeRO stages 0 to 2.
        optimizer: its optimizer.
        outline: of the model before it was configured.

    Returns:
        the pieces, in the order of the model; views of the memory of model and optimizer. Numbers of Python are copied.

    Raises:
        ValueError: ZeRO stage 3; the optimizer's state has entries of an unknown kind; or the model has tensors that
            were not in it, or that are divided in an unknown way.
    """
    check_stage(model)
    pieces: list[TensorPiece] = []
    states = {id(master): state for master, state in states_of(optimizer)}
    for held in held_parameters(model, optimizer, outline):
        memory = held.tensor.detach() if held.master is None else held.master.tensor.detach()
        pieces += pieces_of_memory(held, "param", memory)
        for entry, (kind, value) in ({} if held.master is None else states.get(id(held.master.tensor), {})).items():
            if kind == PARAMETER:
                pieces += pieces_of_memory(held, entry, value.detach())
            else:
                scalar = as_scalar(value) if kind.startswith(NUMBER) else value.detach()
                pieces.append(scalar_piece(held, entry, scalar))
    return pieces + buffer_pieces(model, outline)


def held_parameters(model: nn.Module, optimizer: Any, outline: ModelOutline) -> Iterator[HeldTensor]:
    """The parameters that this rank has a part of, in the order of the model; tied ones once.

    Raises:
        ValueError: see :func:`pieces_of`.
    """
    masters = masters_of(optimizer)
    seen: set[int] = set()
    for module_name, module in bare_model(model).named_modules(remove_duplicate=False):
        for own_name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = _name(module_name, own_name, outline)
            shape = outline.shapes[name]
            yield HeldTensor(
                name=name,
                layer=outline.layers[name],
                shape=shape,
                tensor=parameter,
                division=division_of(parameter, module, shape, name),
                is_tied=name in outline.tied,
                master=masters.get(id(parameter)),
            )


def pieces_of_memory(held: HeldTensor, entry: str, memory: Tensor) -> list[TensorPiece]:
    """The pieces of a tensor with the shape of the master, or of the parameter if there is none.

    Args:
        held: the parameter.
        entry: what the tensor is, e.g. ``param`` or ``exp_avg``.
        memory: the tensor.
    """
    master = held.master
    pieces = []
    for part in held.parts:
        if master is not None and master.is_flat:
            data = _in_slice(memory, held.tensor, part.local, master.start)
        else:
            everything = Box((0,) * held.tensor.dim(), tuple(held.tensor.shape))
            data = memory[everything.slices_of(part.local)] if held.tensor.dim() else memory
        shard = held.shard(held.division.shard + ("" if master is None else master.shard))
        pieces.append(TensorPiece(held.layer, f"{entry}.{held.name}", held.shape, part.whole, data, shard))
    return pieces


def _in_slice(memory: Tensor, parameter: Tensor, box: Box, start: int) -> Tensor:
    """The view of a slice of the flattened parameter, which begins at element ``start``, that has the elements of a box
    of the parameter."""
    strides = [1] * parameter.dim()
    for dim in reversed(range(parameter.dim() - 1)):
        strides[dim] = strides[dim + 1] * parameter.shape[dim + 1]
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    return memory.as_strided(box.sizes, strides, memory.storage_offset() + first - start)


def scalar_piece(held: HeldTensor, entry: str, scalar: Tensor) -> TensorPiece:
    """The piece of an entry of a parameter's state without dimensions. All ranks with the parameter hold the same."""
    ((_, box),) = whole(())
    return TensorPiece(held.layer, f"{entry}.{held.name}", (), box, scalar, held.shard(WHOLE))


def buffer_pieces(model: nn.Module, outline: ModelOutline) -> list[TensorPiece]:
    """The pieces of the model's persistent buffers."""
    pieces: list[TensorPiece] = []
    seen: set[int] = set()
    for module_name, module in bare_model(model).named_modules(remove_duplicate=False):
        for own_name, buffer in persistent_buffers(module):
            if id(buffer) in seen:
                continue
            seen.add(id(buffer))
            name = _name(module_name, own_name, outline)
            shape = outline.shapes[name]
            division_of(buffer, module, shape, name)  # buffers are never divided: checks the shape
            if buffer.numel():
                box = whole(shape)[0].whole
                pieces.append(TensorPiece(outline.layers[name], f"buffer.{name}", shape, box, buffer.detach(), WHOLE))
    return pieces


def _name(module: str, own: str, outline: ModelOutline) -> str:
    name = plain_name(f"{module}.{own}" if module else own)
    if name not in outline.names:
        raise ValueError(
            f"the model has a tensor {name} that it did not have before booster.boost, so that other plans would not "
            "find it in a layer checkpoint; save this model with booster.save_model"
        )
    return outline.names[name]


def agreed_buffers(pieces: list[TensorPiece], outline: ModelOutline) -> list[TensorPiece]:
    """The same pieces, with the buffers of the first rank that has each. Every rank calls it.

    Replicas see other samples, so that their statistics differ. Those of the first one count, as in Colossal-AI's
    checkpoints; torch's data parallelism copies them to the other replicas before the next forward pass.
    """
    parameters = {name for names in outline.groups for name in names}
    if all(name in parameters for name in outline.shapes):
        return pieces
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {each.key: each.data.cpu() for each in pieces if each.key.startswith("buffer.")})
    values = {key: value for found in reversed(everyone) for key, value in found.items()}
    return [replace(each, data=values[each.key]) if each.key in values else each for each in pieces]
