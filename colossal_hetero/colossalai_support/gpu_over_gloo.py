"""Tensors of a GPU over Gloo: ranks that share a GPU, and jobs in which some ranks have a GPU and others a CPU.

NCCL refuses two ranks on one GPU, and has no CPU tensors. Gloo copies a GPU's tensors to the host and back in
all-reduce and broadcast only; messages between two ranks would read GPU addresses as addresses of the host. So these
run on copies in pinned host memory: ranks with a GPU and with a CPU call the same functions, in which they must agree.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves, tree_map

from . import cpu
from .accelerator import get_accelerator

Group = dist.ProcessGroup | None
NeedsHost = Callable[[Tensor, Group], bool]
"""True if a tensor has to be copied to the host to communicate over a group."""
OUTPUTS: dict[str, str | None] = {
    "reduce": "tensor",
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "_all_gather_base": "output_tensor",
    "all_gather_single": "output_tensor",
    "gather": "gather_list",
    "scatter": "tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
    "_reduce_scatter_base": "output",
    "reduce_scatter_single": "output",
    "all_to_all": "output_tensor_list",
    "all_to_all_single": "output",
    "send": None,
    "isend": None,
    "recv": "tensor",
    "irecv": "tensor",
}
"""Collectives that run on copies, each with the argument that it writes to."""


def is_gpu_over_gloo(group: Group = None) -> bool:
    """True if this process has a GPU, and ``group`` (default: all ranks) sends its tensors over Gloo."""
    if get_accelerator().name != "cuda" or not dist.is_initialized() or dist.get_rank(group) < 0:
        return False
    return "cuda:gloo" in dist.get_backend_config(group)


def support_gpus_over_gloo(group: Group = None) -> None:
    """If this process has a GPU and ``group`` is Gloo's, let all collectives over Gloo take the GPU's tensors, and
    Colossal-AI's pipelines and ZeRO communicate as on a CPU."""
    if is_gpu_over_gloo(group):
        _replace_collectives()


@cache
def _replace_collectives() -> None:
    # All ranks must send the same messages as ranks with a CPU, which have these patches too. For example, with its own
    # overlap ZeRO sums gradients in the order in which the backward pass makes them, and without it in another one.
    cpu.patch_collectives()
    cpu.patch_point_to_point()
    cpu.patch_zero()
    for name in OUTPUTS:
        collective = getattr(dist, name, None) or getattr(distributed_c10d, name, None)
        if collective is not None:
            _replace(name, through_host(collective))
    _replace("batch_isend_irecv", batch_through_host(dist.batch_isend_irecv))


def _replace(name: str, function: Callable[..., Any]) -> None:
    for module in (dist, distributed_c10d):
        if hasattr(module, name):
            setattr(module, name, function)


def _is_on_gpu(tensor: Tensor, group: Group) -> bool:
    return tensor.is_cuda and is_gpu_over_gloo(group)


def through_host(collective: Callable[..., Any], needs_host: NeedsHost = _is_on_gpu) -> Callable[..., Any]:
    """``collective`` on copies in host memory of the tensors that need it, after waiting for the device. Results are
    copied back before it returns or, if it does not wait itself, in ``wait`` of its handle."""
    signature, output = inspect.signature(collective), OUTPUTS[collective.__name__]

    @wraps(collective)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        group = call.arguments.get("group")
        if not any(isinstance(leaf, Tensor) and needs_host(leaf, group) for leaf in tree_leaves(call.arguments)):
            return collective(*args, **kwargs)
        results: list[tuple[Tensor, Tensor]] = []
        for name, value in call.arguments.items():
            copied = results if name == output else []
            call.arguments[name] = tree_map(partial(_on_host, group=group, needs_host=needs_host, copied=copied), value)
        answer = collective(*call.args, **call.kwargs)
        if hasattr(answer, "wait"):
            return _Work(answer, results, list(call.arguments.values()))
        _copy_back(results)
        return answer

    return run


def batch_through_host(batch: Callable[..., Any], needs_host: NeedsHost = _is_on_gpu) -> Callable[..., Any]:
    """``torch.distributed.batch_isend_irecv``, which starts messages that need the host one by one, in their order:
    only NCCL can start all messages of a GPU together."""

    @wraps(batch)
    def run(p2p_op_list: Sequence[dist.P2POp]) -> list[Any]:
        if not any(needs_host(each.tensor, each.group) for each in p2p_op_list):
            return batch(p2p_op_list)
        return [each.op(each.tensor, each.peer, each.group, each.tag) for each in p2p_op_list]

    return run


class _Work:
    """The handle of a collective on copies, whose results are copied back in the first ``wait``."""

    def __init__(self, work: Any, results: list[tuple[Tensor, Tensor]], kept: list[Any]) -> None:
        self._work = work
        self._results = results
        self._kept = kept  # what is sent must exist until then

    def wait(self, timeout: Any = None) -> bool:
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
            _copy_back(self._results)
            self._kept.clear()
        return True

    def is_completed(self) -> bool:
        return self._work is None


def _on_host(value: Any, group: Group, needs_host: NeedsHost, copied: list[tuple[Tensor, Tensor]]) -> Any:
    if not (isinstance(value, Tensor) and needs_host(value, group)):
        return value
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=torch.cuda.is_available())
    host.copy_(value.detach())
    copied.append((value, host))
    return host


def _copy_back(results: list[tuple[Tensor, Tensor]]) -> None:
    for value, host in results:
        value.detach().copy_(host, non_blocking=True)
    results.clear()
