"""Replace collectives by local ones that do not communicate, while a rank is profiled. Each rank tries micro-batches at
its own pace and may run out of memory in the middle of a step: no other rank is left waiting, and times do not include
communication, while all buffers are allocated as in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

__all__ = ["FinishedWork", "local_collectives"]

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

    def synchronize(self) -> None:
        """Do nothing, because the collective is finished."""

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
    """In the block, collectives of ``torch.distributed`` use only the data of this rank and do not communicate.

    This rank's data replaces that of the others: reductions leave a tensor unchanged, and a gathered one holds this
    rank's part once per rank. Gathered values are invalid after the block; :func:`.abort_step` drops those of FSDP.
    Only collectives called as attributes of ``torch.distributed`` are covered; ZeRO's optimizer, Gemini, FSDP and
    ``SyncBatchNorm`` use no others. ``DistributedDataParallel`` reduces gradients in C++, so instances in ``model`` do
    not synchronize. Point-to-point messages and DTensor's functional collectives are not covered.
    """
    modules = (dist, distributed_c10d)
    saved = [(module, name, getattr(module, name)) for module in modules for name in _LOCAL if hasattr(module, name)]
    replicas = [] if model is None else [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    synced = [(part.require_backward_grad_sync, part.require_forward_param_sync) for part in replicas]
    try:
        for module, name, _ in saved:
            local = _LOCAL[name]
            setattr(module, name, local if doubled is None or name not in _DOUBLED else _double(name, local, doubled))
        for replica in replicas:
            replica.require_backward_grad_sync = False
        yield
    finally:
        for module, name, function in saved:
            setattr(module, name, function)
        for replica, (backward, forward) in zip(replicas, synced, strict=True):
            replica.require_backward_grad_sync, replica.require_forward_param_sync = backward, forward


def _fill(output: Tensor, own: Tensor) -> None:
    """Fill ``output`` with copies of ``own``; a piece of ``output`` with the same memory as ``own`` is skipped."""
    flat, part = output.detach().view(-1), own.detach().reshape(-1)
    if part.numel() == 0:
        return
    for piece in flat.split(part.numel()):
        if piece.data_ptr() != part.data_ptr():
            piece.copy_(part[: piece.numel()])


def _done(results: Sequence[Tensor], async_op: bool) -> FinishedWork | None:
    return FinishedWork(results) if async_op else None


def _own(pieces: Sequence[Tensor], group: Group) -> Tensor:
    return pieces[max(dist.get_rank(group), 0)]


def _in_place(tensor: Tensor | Sequence[Tensor], *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
    """``all_reduce``, ``reduce``, ``broadcast`` and their coalesced versions; ``async_op`` is their last argument."""
    in_flight = async_op or (bool(args) and args[-1] is True)
    return _done([tensor] if isinstance(tensor, Tensor) else tensor, in_flight)


def _all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> FinishedWork | None:
    for output in tensor_list:
        _fill(output, tensor)
    return _done(tensor_list, async_op)


def _all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> FinishedWork | None:
    _fill(output_tensor, input_tensor)
    return _done([output_tensor], async_op)


def _all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Tensor]],
    input_tensor_list: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> FinishedWork | None:
    for outputs in output_tensor_lists:
        for output, own in zip(outputs, input_tensor_list, strict=True):
            _fill(output, own)
    return _done([output for outputs in output_tensor_lists for output in outputs], async_op)


def _reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Any = None, group: Group = None, async_op: bool = False
) -> FinishedWork | None:
    _fill(output, _own(input_list, group))
    return _done([output], async_op)


def _reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = None, group: Group = None, async_op: bool = False
) -> FinishedWork | None:
    _fill(output, _own(input.detach().reshape(-1).split(max(output.numel(), 1)) or [input], group))
    return _done([output], async_op)


def _all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> FinishedWork | None:
    for output, own in zip(output_tensor_list, input_tensor_list, strict=True):
        _fill(output, own)
    return _done(output_tensor_list, async_op)


def _all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> FinishedWork | None:
    _fill(output, input)
    return _done([output], async_op)


def _gather(
    tensor: Tensor, gather_list: Sequence[Tensor] | None = None, *args: Any, async_op: bool = False, **kwargs: Any
) -> FinishedWork | None:
    for output in gather_list or ():
        _fill(output, tensor)
    return _done([tensor], async_op)


def _scatter(
    tensor: Tensor, scatter_list: Sequence[Tensor] | None = None, *args: Any, async_op: bool = False, **kwargs: Any
) -> FinishedWork | None:
    if scatter_list:
        _fill(tensor, scatter_list[0])
    return _done([tensor], async_op)


def _all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Broadcast objects and coalesced buffers keep their values on this rank."""


def _barrier(group: Group = None, async_op: bool = False, device_ids: Any = None) -> FinishedWork | None:
    return _done([], async_op)


def _double(name: str, local: Callable[..., Any], doubled: Callable[[str, Group], bool]) -> Callable[..., Any]:
    """``local``, which doubles its result, the first argument, if ``doubled`` says so."""

    def run(result: Any, *args: Any, **kwargs: Any) -> Any:
        answer = local(result, *args, **kwargs)
        groups = [each for each in (*args, kwargs.get("group")) if isinstance(each, dist.ProcessGroup)]
        if doubled(name, groups[0] if groups else None):
            for index, each in enumerate(result if isinstance(result, list) else [result]):
                if isinstance(each, Tensor):
                    each.detach().mul_(2)
                elif isinstance(each, int | float) and isinstance(result, list):
                    result[index] = each * 2
        return answer

    return run


_DOUBLED = ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_object")

_LOCAL: dict[str, Callable[..., Any]] = {
    "all_reduce": _in_place,
    "all_reduce_coalesced": _in_place,
    "reduce": _in_place,
    "broadcast": _in_place,
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "_all_gather_base": _all_gather_into_tensor,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "_reduce_scatter_base": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "gather": _gather,
    "scatter": _scatter,
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": _nothing,
    "_broadcast_coalesced": _nothing,
    "barrier": _barrier,
    "monitored_barrier": _nothing,
}
