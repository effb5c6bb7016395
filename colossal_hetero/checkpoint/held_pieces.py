"""The pieces of a model and its optimizer that this rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from colossalai.interface import ModelWrapper
from colossalai.shardformer.layer import FusedLinear1D_Row, GPT2FusedLinearConv1D_Col
from colossalai.tensor.d_tensor.api import get_shard_dim_1d, is_customized_distributed_tensor, is_distributed_tensor
from colossalai.tensor.padded_tensor import is_padded_tensor
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..common.ranks import of_every_rank
from .model_outline import ModelOutline, persistent_buffers, plain_name
from .optimizer_memory import NUMBER, PARAMETER, Master, as_scalar, check_stage, masters_of, states_of
from .pieces import Box, TensorPiece

# Boxes of a rank's *local* tensor and of the whole one. Pure. What no part covers is padding: it is not saved, and zero
# when the tensor is loaded.


class LocalPart(NamedTuple):
    """A box of the local tensor, and the box of the whole tensor that it is; both have the same sizes."""

    local: Box
    whole: Box


def whole(shape: Sequence[int]) -> tuple[LocalPart, ...]:
    box = Box((0,) * len(shape), tuple(shape))
    return (LocalPart(box, box),) if box.numel else ()


def divided(
    shape: Sequence[int], dim: int, sections: Sequence[int], rank: int, ranks: int, padded: int = 0
) -> tuple[LocalPart, ...]:
    """A rank's parts of a tensor that is divided along ``dim``: an even share of each section, one after another."""
    dim %= len(shape)
    size = max(shape[dim], padded)
    if sum(sections) != size:
        raise ValueError(f"sections {list(sections)} have the sum {sum(sections)}, but dimension {dim} has {size}")
    uneven = [section for section in sections if section % ranks]
    if uneven:
        raise ValueError(f"a section of {uneven[0]} elements cannot be divided evenly over {ranks} ranks")
    parts: list[LocalPart] = []
    start = local = 0
    for section in sections:
        share = section // ranks
        first = start + rank * share
        length = min(share, shape[dim] - first)
        if length > 0:
            sizes = (*shape[:dim], length, *shape[dim + 1 :])
            part = LocalPart(Box(_at(dim, local, len(shape)), sizes), Box(_at(dim, first, len(shape)), sizes))
            if part.local.numel:
                parts.append(part)
        start += section
        local += share
    return tuple(parts)


def _at(dim: int, offset: int, dims: int) -> tuple[int, ...]:
    return tuple(offset if each == dim else 0 for each in range(dims))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Boxes, each contiguous in memory, with elements ``start`` to ``stop`` (exclusive) of the flattened tensor."""
    start, stop = max(start, 0), min(stop, math.prod(shape))
    if start >= stop:
        return ()
    if len(shape) <= 1:
        return (Box((start,), (stop - start,)),) if shape else (Box((), ()),)
    row = math.prod(shape[1:])
    boxes: list[Box] = []
    while start < stop:
        index = start // row
        if start % row == 0 and stop - start >= row:
            count = (stop - start) // row
            boxes.append(Box((index, *(0 for _ in shape[1:])), (count, *shape[1:])))
            start += count * row
        else:
            end = min(stop, (index + 1) * row)
            inner = flat_boxes(shape[1:], start - index * row, end - index * row)
            boxes += [Box((index, *box.offsets), (1, *box.sizes)) for box in inner]
            start = end
    return tuple(boxes)


def sliced(parts: Iterable[LocalPart], shape: Sequence[int], start: int, stop: int) -> tuple[LocalPart, ...]:
    """Parts within the slice ``start`` to ``stop`` of the flattened local tensor, cut there."""
    found: list[LocalPart] = []
    parts = tuple(parts)
    for box in flat_boxes(shape, start, stop):
        for part in parts:
            common = part.local.intersection(box)
            if common is not None:
                found.append(LocalPart(common, moved(common, part)))
    return tuple(found)


def moved(box: Box, part: LocalPart) -> Box:
    """The box of the whole tensor that ``box``, which lies in ``part`` of the local tensor, is."""
    offsets = zip(box.offsets, part.local.offsets, part.whole.offsets, strict=True)
    return Box(tuple(offset - local + there for offset, local, there in offsets), box.sizes)


WHOLE = "whole"  # shard of what all ranks of a tensor-parallel group and of a ZeRO group hold


class TensorDivision(NamedTuple):
    parts: tuple[LocalPart, ...]
    shard: str  # ``tp0of2`` on rank 0 of a tensor-parallel group of two; ``whole`` if the tensor is not divided
    is_padded: bool  # True if some tensor-parallel rank has elements that are in no part


def division_of(tensor: Tensor, module: nn.Module, shape: Sequence[int], name: str) -> TensorDivision:
    given: Any = tensor
    dim, sections, group, padded = 0, [], None, given._current_length if is_padded_tensor(given) else 0
    if is_distributed_tensor(given) and tuple(given.shape) != tuple(given.dist_layout.global_shape):
        dim, group = get_shard_dim_1d(given), given.dist_layout.device_mesh.get_process_group(axis=0)
        sections = [given.dist_layout.global_shape[dim]]
    elif is_customized_distributed_tensor(given) and hasattr(module, "split_sizes"):
        # Conv1D has the transposed weight of Linear, and a row-parallel layer divides the inputs.
        dim = -1 if isinstance(module, GPT2FusedLinearConv1D_Col | FusedLinear1D_Row) else 0
        group, sections = module.process_group, list(module.split_sizes)  # type: ignore[assignment]
    elif padded:
        dim, sections = given._padding_dim, [padded]
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    parts = divided(shape, dim, sections, rank, ranks, padded) if sections else whole(shape)
    shard = WHOLE if group is None else f"tp{rank}of{ranks}"
    local = Box((0,) * tensor.dim(), tuple(tensor.shape))
    fits = len(shape) == tensor.dim() and all(part.local.intersection(local) == part.local for part in parts)
    found = sum(part.local.numel for part in parts)
    if not fits or (found != tensor.numel() and not padded):
        raise ValueError(
            f"{name} has shape {list(shape)} in the model and {list(tensor.shape)} on this rank, which is not a "
            "division that layer checkpoints know; save this model with booster.save_model"
        )
    return TensorDivision(parts, shard, padded > 0)


class HeldTensor(NamedTuple):
    name: str  # name in the model of one process
    layer: str
    shape: tuple[int, ...]
    tensor: Tensor
    division: TensorDivision
    is_tied: bool  # True if the model has the parameter in several places: several stages of a pipeline may hold it
    master: Master | None  # memory that the optimizer updates; None if it does not update the parameter

    def shard(self, division: str) -> str:
        """Name of the shard; tied parameters have their own, because a stage may hold one without the layer's rest."""
        return f"{division}.tied" if self.is_tied else division


def bare_model(model: nn.Module) -> nn.Module:
    while isinstance(model, ModelWrapper | DistributedDataParallel):
        model = model.module
    return model


def pieces_of(model: nn.Module, optimizer: Any, outline: ModelOutline) -> list[TensorPiece]:
    """The pieces of parameters, persistent buffers and optimizer state that this rank holds, in the order of the model.

    Parameters have the values that the optimizer updates: masters in higher precision, if there are any. Pieces are
    views of memory; numbers of Python are copied. Ranks that hold the same box have the same piece, except for buffers.
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
    """Parameters that this rank has a part of, in the order of the model; tied ones once."""
    masters = masters_of(optimizer)
    for module, name, parameter in _tensors(model, outline, lambda module: module._parameters.items()):
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
    """The pieces of a tensor with the shape of the master, or of the parameter if there is none."""
    master, division, shape = held.master, held.division, held.tensor.shape
    found: list[tuple[LocalPart, Tensor, str]] = []
    if master is None or not master.is_flat:
        everything = Box((0,) * held.tensor.dim(), tuple(shape))
        for part in division.parts:
            found.append((part, memory[everything.slices_of(part.local)] if shape else memory, division.shard))
    else:
        for number, own in zip(master.slice_numbers, memory.chunk(len(master.slice_numbers)), strict=True):
            start, is_only = number * own.numel(), master.slices == 1
            shard = division.shard + ("" if is_only else f".zero{number}of{master.slices}")
            parts = division.parts if is_only else sliced(division.parts, shape, start, start + own.numel())
            found += [(part, _in_slice(own, held.tensor, part.local, start), shard) for part in parts]
    return [
        TensorPiece(held.layer, f"{entry}.{held.name}", held.shape, part.whole, data, held.shard(shard))
        for part, data, shard in found
    ]


def _in_slice(memory: Tensor, parameter: Tensor, box: Box, start: int) -> Tensor:
    """View of ``box`` of the parameter in ``memory``: a slice from element ``start`` of the flattened parameter."""
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
    pieces: list[TensorPiece] = []
    for module, name, buffer in _tensors(model, outline, persistent_buffers):
        shape = outline.shapes[name]
        for part in division_of(buffer, module, shape, name).parts:  # one or none: buffers are not divided
            pieces.append(
                TensorPiece(outline.layers[name], f"buffer.{name}", shape, part.whole, buffer.detach(), WHOLE)
            )
    return pieces


def _tensors(
    model: nn.Module, outline: ModelOutline, of_module: Callable[[nn.Module], Iterable[tuple[str, Tensor | None]]]
) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Each tensor once, with its module and its name in the model of one process."""
    seen: set[int] = set()
    for module_name, module in bare_model(model).named_modules(remove_duplicate=False):
        for own_name, tensor in of_module(module):
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            name = plain_name(f"{module_name}.{own_name}" if module_name else own_name)
            if name not in outline.names:
                raise ValueError(
                    f"the model has a tensor {name} that it did not have before booster.boost, so that other plans "
                    "would not find it in a layer checkpoint; save this model with booster.save_model"
                )
            yield module, outline.names[name], tensor


def agreed_buffers(pieces: list[TensorPiece], outline: ModelOutline) -> list[TensorPiece]:
    """The pieces, with the buffers of the first rank that has each, as Colossal-AI saves them. Every rank calls it."""
    parameters = {name for names in outline.groups for name in names}
    if all(name in parameters for name in outline.shapes):
        return pieces
    everyone = of_every_rank({each.key: each.data.cpu() for each in pieces if each.key.startswith("buffer.")})
    values = {key: value for found in reversed(everyone) for key, value in found.items()}
    return [replace(each, data=values[each.key]) if each.key in values else each for each in pieces]
