"""Replace collectives by local ones that do not communicate, while a rank is profiled. Each rank tries micro-batches at
its own pace and may run out of memory in the middle of a step: no other rank is left waiting, and times do not include
communication, while all buffers are allocated as in training."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

Group = dist.ProcessGroup | None


class FinishedWork(dist.Work):
    def __init__(self, results: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._results = list(results)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._results)
        return future


@contextmanager
def local_collectives(
    model: torch.nn.Module | None = None, doubled: Callable[[str, Group], bool] | None = None
) -> Iterator[None]:
    """In the block, collectives of ``torch.distributed`` use only the data of this rank, in place of that of the
    others, and do not communicate. Gathered values are invalid after the block; :func:`.abort_step` drops those of
    FSDP.

    Only collectives called as attributes of ``torch.distributed`` are covered; ZeRO's optimizer, Gemini, FSDP and
    ``SyncBatchNorm`` use no others. ``DistributedDataParallel`` in ``model`` does not synchronize."""
    modules = (dist, distributed_c10d)
    saved = [(module, name, getattr(module, name)) for module in modules for name in _NAMES if hasattr(module, name)]
    replicas = [] if model is None else [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    synced = [(part.require_backward_grad_sync, part.require_forward_param_sync) for part in replicas]
    try:
        for module, name, function in saved:
            setattr(module, name, _local(name, function, doubled))
        for replica in replicas:
            replica.require_backward_grad_sync = False
        yield
    finally:
        for module, name, function in saved:
            setattr(module, name, function)
        for replica, (backward, forward) in zip(replicas, synced, strict=True):
            replica.require_backward_grad_sync, replica.require_forward_param_sync = backward, forward


def _fill(output: Tensor, own: Tensor) -> None:
    flat, part = output.detach().view(-1), own.detach().reshape(-1)
    if part.numel() == 0:
        return
    for piece in flat.split(part.numel()):
        if piece.data_ptr() != part.data_ptr():
            piece.copy_(part[: piece.numel()])


def _own(pieces: Sequence[Tensor], group: Group) -> Tensor:
    return pieces[max(dist.get_rank(group), 0)]


Given = dict[str, Any]
_IN_PLACE = {"all_reduce": "tensor", "all_reduce_coalesced": "tensors", "reduce": "tensor", "broadcast": "tensor"}
_OBJECTS = {"all_gather_object": "object_list", "gather_object": "object_gather_list"}
_FILLED: dict[str, Callable[[Given], Iterable[tuple[Tensor, Tensor]]]] = {
    "all_gather": lambda given: [(each, given["tensor"]) for each in given["tensor_list"]],
    "all_gather_coalesced": lambda given: [
        pair
        for outputs in given["output_tensor_lists"]
        for pair in zip(outputs, given["input_tensor_list"], strict=True)
    ],
    "all_gather_into_tensor": lambda given: [(given["output_tensor"], given["input_tensor"])],
    "reduce_scatter": lambda given: [(given["output"], _own(given["input_list"], given["group"]))],
    "reduce_scatter_tensor": lambda given: [(given["output"], _own(_pieces(given), given["group"]))],
    "all_to_all": lambda given: zip(given["output_tensor_list"], given["input_tensor_list"], strict=True),
    "all_to_all_single": lambda given: [(given["output"], given["input"])],
    "gather": lambda given: [(each, given["tensor"]) for each in given["gather_list"] or ()],
    "scatter": lambda given: [(given["tensor"], each) for each in (given["scatter_list"] or ())[:1]],
}
"""Outputs, each with the data of this rank that fills it."""
_SAME = {
    "_all_gather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
"""Earlier and later names (from torch 2.14 on) of a collective."""
_NOTHING = ("broadcast_object_list", "_broadcast_coalesced", "barrier", "monitored_barrier")
"""Objects and coalesced buffers that are broadcast keep their values on this rank."""
_NAMES = (*_IN_PLACE, *_OBJECTS, *_FILLED, *_SAME, *_NOTHING)
_DOUBLED = ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_object")


def _pieces(given: Given) -> Sequence[Tensor]:
    return given["input"].detach().reshape(-1).split(max(given["output"].numel(), 1)) or [given["input"]]


def _results(name: str, given: Given) -> Sequence[Any]:
    """Results of a collective, computed from the data of this rank."""
    if name in _IN_PLACE:
        kept = given[_IN_PLACE[name]]
        return [kept] if isinstance(kept, Tensor) else kept
    if name in _OBJECTS:
        objects = given[_OBJECTS[name]]
        if objects is not None:
            objects[:] = [given["obj"]] * len(objects)
        return objects or []
    filled = list(_FILLED[name](given)) if name in _FILLED else []
    for output, own in filled:
        _fill(output, own)
    return [output for output, _ in filled]


def _local(name: str, function: Any, doubled: Callable[[str, Group], bool] | None) -> Callable[..., Any]:
    """What runs instead of the collective ``function``; it doubles its results if ``doubled`` says so."""
    name = _SAME.get(name, name)
    try:
        signature = _signature(function)
    except ValueError:  # it is not written in Python, such as ``_broadcast_coalesced``
        return lambda *args, **kwargs: None

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> FinishedWork | None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        results = _results(name, bound.arguments)
        if doubled is not None and name in _DOUBLED and doubled(name, bound.arguments["group"]):
            for index, each in enumerate(results):
                if isinstance(each, Tensor):
                    each.detach().mul_(2)
                elif isinstance(each, int | float):
                    results[index] = each * 2  # type: ignore[index]
        return FinishedWork(results) if bound.arguments.get("async_op") else None

    return run


_signature = functools.lru_cache(maxsize=256)(inspect.signature)
