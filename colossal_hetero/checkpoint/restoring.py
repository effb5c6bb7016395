"""Load pieces into a model and its optimizer, and bring everything else that depends on them up to date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from colossalai.zero.low_level import LowLevelZeroOptimizer
from colossalai.zero.low_level._utils import all_gather_into_flat_tensor_nd
from torch import Tensor

from ..colossalai_support.accelerator import get_accelerator
from ..profiling.aborted_step import find_zero_optimizer
from ..profiling.preserved_state import inner_optimizer
from .held_pieces import HeldTensor, buffer_pieces, held_parameters, pieces_of_memory, scalar_piece
from .model_outline import ModelOutline
from .optimizer_memory import NUMBER, PARAMETER, check_stage, masters_of
from .pieces import TensorPiece
from .run_states import Training


def check_same_model(outline: ModelOutline, saved: Mapping[str, Sequence[int]]) -> None:
    kept = {key.split(".", 1)[1]: tuple(shape) for key, shape in saved.items() if key.startswith(("param.", "buffer."))}
    missing = [name for name in outline.stored if name not in kept]
    unknown = [name for name in kept if name not in outline.shapes]
    others = [
        f"{name} has shape {list(kept[name])} there and {list(shape)} here"
        for name, shape in outline.shapes.items()
        if name in kept and kept[name] != shape
    ]
    differences = [
        *([f"it lacks {some(missing)}"] if missing else []),
        *([f"it has {some(unknown)}, which this model does not have"] if unknown else []),
        *([some(others)] if others else []),
    ]
    if differences:
        raise ValueError(
            f"the checkpoint is of another model: {'; '.join(differences)}. Build the model with the configuration "
            "that it was saved with, or name another folder"
        )


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class Restoring:
    """Loads a checkpoint into a model and its optimizer, on all ranks: read :attr:`pieces`, call :meth:`finish`."""

    def __init__(self, training: Training, saved: Mapping[str, Sequence[int]], kinds: Mapping[str, str]) -> None:
        model, optimizer, outline = training.model, training.optimizer, training.outline
        check_stage(model)
        check_same_model(outline, saved)
        wait_for_parameters(optimizer)
        self.pieces: list[TensorPiece] = []
        self._optimizer = optimizer
        self._numbers: list[tuple[dict[str, Any], str, Tensor]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        states = inner_optimizer(optimizer).state
        self._scalar_devices = _scalar_devices(optimizer)
        states.clear()
        for held in held_parameters(model, optimizer, outline):
            memory = held.tensor.detach() if held.master is None else held.master.tensor.detach()
            if held.division.is_padded:
                memory.zero_()
            self.pieces += pieces_of_memory(held, "param", memory)
            if held.master is None:
                continue
            if held.master.tensor is not held.tensor and not held.master.is_flat:
                self._copies.append((held.tensor, held.master.tensor))
            state = self._state(held, saved, kinds)
            if state:
                states[held.master.tensor] = state
        self.pieces += buffer_pieces(model, outline)

    def _state(self, held: HeldTensor, saved: Mapping[str, Sequence[int]], kinds: Mapping[str, str]) -> dict[str, Any]:
        """A state of zeros with the entries that the checkpoint has for a parameter; adds their pieces."""
        assert held.master is not None
        state: dict[str, Any] = {}
        for entry, kind in kinds.items():
            if f"{entry}.{held.name}" not in saved:
                continue
            if kind == PARAMETER:
                state[entry] = torch.zeros_like(held.master.tensor, requires_grad=False)
                self.pieces += pieces_of_memory(held, entry, state[entry])
            elif kind.startswith(NUMBER):
                number = torch.zeros((), dtype=dtype_of(kind))
                self._numbers.append((state, entry, number))
                state[entry] = 0
                self.pieces.append(scalar_piece(held, entry, number))
            else:
                device = self._scalar_devices.get(id(held.master.tensor))
                state[entry] = torch.zeros((), dtype=dtype_of(kind), device=device)
                self.pieces.append(scalar_piece(held, entry, state[entry]))
        return state

    @torch.no_grad()
    def finish(self) -> None:
        """Compute the model's parameters from what was read. Every rank of a ZeRO group calls it."""
        for state, entry, number in self._numbers:
            state[entry] = number.item()
        for parameter, master in self._copies:
            parameter.data.copy_(master)
        zero = find_zero_optimizer(self._optimizer)
        if zero is not None:
            _gather(zero)


def _scalar_devices(optimizer: Any) -> dict[int, torch.device]:
    """Devices on which torch's optimizers count the steps of parameters, by ``id``; the host for those left out."""
    return {
        id(parameter): parameter.device
        for group in inner_optimizer(optimizer).param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }


def dtype_of(kind: str) -> torch.dtype:
    return getattr(torch, kind.split(".")[1])  # type: ignore[no-any-return]


def wait_for_parameters(optimizer: Any) -> None:
    """Wait until parameters are complete that are gathered in the next forward pass."""
    zero = find_zero_optimizer(optimizer)
    if zero is not None and hasattr(zero, "_force_wait_all_gather"):
        zero._force_wait_all_gather()


def _gather(zero: LowLevelZeroOptimizer) -> None:
    device = get_accelerator().get_current_device()
    masters = masters_of(zero)
    for parameter, group in zero.param_to_pg.items():
        master = masters.get(id(parameter))
        if master is None:
            continue
        part = master.tensor.chunk(len(master.slice_numbers))[0].to(device).to(parameter.dtype)
        gathered = part.new_empty(part.numel() * master.slices)
        all_gather_into_flat_tensor_nd(gathered, part, group)
        parameter.data.copy_(gathered[: parameter.numel()].view(parameter.shape))
