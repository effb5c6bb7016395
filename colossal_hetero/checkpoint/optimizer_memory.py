"""Memory of the values that an optimizer updates: the model, masters, or ZeRO's slices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from colossalai.interface import OptimizerWrapper
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from ..common.ranks import slices_held
from ..profiling.aborted_step import find_zero_optimizer
from ..profiling.preserved_state import inner_optimizer

PARAMETER, SCALAR, NUMBER = "parameter", "scalar", "number"
"""Kinds of entries of an optimizer's state: a tensor with the parameter's shape, a tensor without dimensions, a number
of Python. The latter two are followed by a dot and the type in which they are saved: ``scalar.float32``."""


class Master(NamedTuple):
    tensor: Tensor
    """Memory with the shape of the parameter on this rank, or of slices of the flattened parameter, in turn."""
    slice_numbers: tuple[int, ...]  # slices in this memory; the first one is the one that this rank sends to others
    slices: int
    """Number of slices. With more than one, the last ones may end with padding."""
    is_flat: bool  # True if it has slices of the flattened parameter, also if there is only one


def check_stage(model: Any) -> None:
    if FullyShardedDataParallel.fsdp_modules(model):
        raise ValueError(
            "layer checkpoints are for ZeRO stages 0 to 2; at stage 3 save with booster.save_model and "
            "booster.save_optimizer, which any stage can load"
        )


def masters_of(optimizer: Any) -> dict[int, Master]:
    zero = find_zero_optimizer(optimizer)
    if zero is not None:
        copies, masters = getattr(zero, "copies", 1), {}
        for key, master in zero.working_to_master_param.items():
            rank, ranks = zero.pid_to_bucket_store[key].local_rank, zero.pid_to_bucket_store[key].world_size
            masters[key] = Master(master, slices_held(rank, ranks, copies), ranks, True)
        return masters
    # Wrappers that have no masters lack the method, or return None.
    found = getattr(optimizer, "get_working_to_master_map", lambda: None)()
    if found is not None:
        return {key: Master(master, (0,), 1, False) for key, master in found.items()}
    return {
        id(parameter): Master(parameter, (0,), 1, False)
        for group in inner_optimizer(optimizer).param_groups
        for parameter in group["params"]
    }


def state_entries(optimizer: Any) -> dict[str, str]:
    """The kind of each entry of the optimizer's state on this rank, by its name; see :data:`PARAMETER`."""
    kinds: dict[str, str] = {}
    for _, state in states_of(optimizer):
        kinds |= {entry: kind for entry, (kind, _) in state.items()}
    return kinds


def states_of(optimizer: OptimizerWrapper) -> Iterator[tuple[Tensor, dict[str, tuple[str, Any]]]]:
    """Kind and value of each entry of each master's state. Entries that are None are left out."""
    inner = inner_optimizer(optimizer)
    for master, state in inner.state.items():
        yield (
            master,
            {
                entry: (_kind(type(inner).__name__, entry, value, master), value)
                for entry, value in state.items()
                if value is not None
            },
        )


def as_scalar(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.int64 if isinstance(number, int) else torch.float64)


def _type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kind(optimizer: str, entry: str, value: Any, master: Tensor) -> str:
    if isinstance(value, Tensor) and value.dim() == 0:
        return f"{SCALAR}.{_type_name(value)}"
    if isinstance(value, Tensor) and value.shape == master.shape:
        return PARAMETER
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{NUMBER}.{_type_name(as_scalar(value))}"
    found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
    raise ValueError(
        f"{optimizer} keeps {entry!r} of a parameter of shape {list(master.shape)} as {found}; layer checkpoints need "
        "numbers, or tensors with the parameter's shape, as AdamW, Adam and SGD have; use one of these, or save with "
        "booster.save_optimizer"
    )
