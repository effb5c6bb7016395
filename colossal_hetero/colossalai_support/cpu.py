"""Patches that let Colossal-AI's hybrid-parallel plugin run on a CPU over Gloo, applied by :mod:`.accelerator` if there
is no GPU or NPU. Each replaces one name and says why; none changes what a GPU does."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from colossalai.pipeline import p2p
from colossalai.pipeline.schedule import InterleavedSchedule, OneForwardOneBackwardSchedule, ZeroBubbleVPipeScheduler
from colossalai.pipeline.weight_grad_store import WeightGradStore
from colossalai.shardformer.layer import _operation, qkv_fused_linear
from colossalai.shardformer.layer.linear import Linear1D_Row
from colossalai.shardformer.layer.qkv_fused_linear import FusedLinear1D_Row, GPT2FusedLinearConv1D_Row
from colossalai.shardformer.layer.utils import Randomizer
from colossalai.zero.low_level import LowLevelZeroOptimizer

from .corrections import ModuleProxy

# Collectives ---------------------------------------------------------------------------------------------------------

TAG = 7083  # tag of the messages, so that they are not mistaken for others between the same ranks


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """``torch.distributed.reduce_scatter`` in terms of ``reduce_scatter_tensor``, which Gloo has."""
    inputs = torch.cat([piece.reshape(-1) for piece in input_list])
    return dist.reduce_scatter_tensor(output.view(-1), inputs, op, group, async_op)


class _PartsInFlight:
    """A sum of which every rank gets its part, as the handle of a collective."""

    def __init__(
        self, output: torch.Tensor, input: torch.Tensor, ranks: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self._output = output
        self._parts = list(input.detach().view(-1).split(output.numel()))
        self._own = ranks.index(dist.get_rank())
        self._received = [torch.empty_like(part) for part in self._parts]
        self._received[self._own] = self._parts[self._own]
        self._messages: list[dist.Work | None] = []
        for index, rank in enumerate(ranks):
            if index != self._own:
                self._messages.append(dist.isend(self._parts[index], rank, group, TAG))
                self._messages.append(dist.irecv(self._received[index], rank, group, TAG))

    def is_completed(self) -> bool:
        return not self._messages

    def wait(self, timeout: Any = None) -> bool:
        if self._messages:
            for message in self._messages:
                if message is not None:
                    message.wait()
            total = self._received[0].clone() if self._own == 0 else self._received[0]
            for part in self._received[1:]:
                total += part
            self._output.detach().view(-1).copy_(total)
            self._messages, self._parts, self._received = [], [], []
        return True


def sent_directly(reduce_scatter_tensor: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.distributed.reduce_scatter_tensor``, in which every rank sends the others their parts and adds its own,
    in the order of the ranks: Gloo sums all parts on all ranks. Other backends and operations use the given
    function."""

    @functools.wraps(reduce_scatter_tensor)
    def run(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        group = group or dist.group.WORLD
        assert group is not None
        is_simple = op == dist.ReduceOp.SUM and output.is_contiguous() and input.is_contiguous()
        ranks = [] if dist.get_rank(group) < 0 else dist.get_process_group_ranks(group)
        fits = input.numel() == output.numel() * len(ranks) and output.dtype == input.dtype
        is_gloo = input.device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(group)
        if not (is_simple and fits and len(ranks) > 1 and is_gloo):
            return reduce_scatter_tensor(output, input, op, group, async_op)
        work = _PartsInFlight(output, input, ranks, group)
        if async_op:
            return work
        work.wait()
        return None

    return run


def patch_collectives() -> None:
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # torch calls it by the second from 2.14 on
        if hasattr(dist, name):
            setattr(dist, name, sent_directly(getattr(dist, name)))
    _operation.dist = ModuleProxy(dist, reduce_scatter=reduce_scatter)


# Point to point ------------------------------------------------------------------------------------------------------
# Messages over Gloo with the semantics of NCCL, on which Colossal-AI's schedules rely: a wait makes the *stream* wait.
#
# the schedules         under plain Gloo                            under this module
# wait on a send         blocks until the peer receives: deadlock    returns at once
# wait twice             blocks for ever the second time             the second wait returns at once
# drop a send's request  may never be delivered                      kept until the schedule's step ends
# reuse a sent tensor    changes the message                         a copy is sent
#
# Only at the end of the step it is safe to wait for the sends: this rank has then posted all its messages and received
# all that it needs, so no other rank is waiting for it.


class _Sent:
    """The request of a sent message, whose wait returns at once because a copy is sent."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Received:
    """The request of a message to receive, which may be waited for more than once."""

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return True

    def is_completed(self) -> bool:
        return self._work is None


class Messages:
    """The messages of this rank: a ``batch_isend_irecv`` that sends copies."""

    def __init__(self) -> None:
        self._sends: list[tuple[dist.Work | None, torch.Tensor]] = []

    def batch_isend_irecv(self, operations: Iterable[dist.P2POp]) -> list[_Sent | _Received]:
        """Start all ``operations`` in their order, in which Gloo matches them; a request for each."""
        requests: list[_Sent | _Received] = []
        for operation in operations:
            if operation.op is dist.isend:
                message = operation.tensor.detach().clone()
                work = dist.isend(message, operation.peer, operation.group, operation.tag)
                self._sends.append((work, message))
                requests.append(_Sent())
            else:
                work = dist.irecv(operation.tensor.detach(), operation.peer, operation.group, operation.tag)
                requests.append(_Received(work))
        return requests

    @property
    def kept(self) -> int:
        return len(self._sends)

    def wait_for_sends(self) -> None:
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        self._sends.clear()

    def forget(self) -> None:
        """Release the copies of a step that never ended, without a wait: their connections are broken or closed."""
        self._sends.clear()


def _then_wait_for_sends(step: Callable[..., Any], messages: Messages) -> Callable[..., Any]:
    @wraps(step)
    def forward_backward_step(*args: Any, **kwargs: Any) -> Any:
        outputs = step(*args, **kwargs)
        messages.wait_for_sends()
        return outputs

    return forward_backward_step


_messages = Messages()


def forget_messages() -> None:
    """Forget the messages of a pipeline whose step never ended, which refer to their process group."""
    _messages.forget()


def patch_point_to_point() -> None:
    """Let Colossal-AI's pipeline send its messages over Gloo."""
    p2p.dist = ModuleProxy(dist, batch_isend_irecv=_messages.batch_isend_irecv)
    for schedule in (OneForwardOneBackwardSchedule, InterleavedSchedule, ZeroBubbleVPipeScheduler):
        schedule.forward_backward_step = _then_wait_for_sends(schedule.forward_backward_step, _messages)
    # For a group that is not NCCL's, the original uses `Backend.HCCL`, which torch does not have.
    p2p._check_for_nccl_hccl_backend = p2p.check_for_nccl_backend


# Layers --------------------------------------------------------------------------------------------------------------


@contextmanager
def _cuda_stays_here(tensor: torch.Tensor) -> Iterator[None]:
    """Let ``tensor.cuda()``, called because NCCL only sends from GPUs, return the tensor, contiguous and detached."""
    tensor.cuda = tensor.detach().contiguous  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del tensor.cuda


def _gathering_here(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``gather_fused_qkv_in_gpt2_style`` without a GPU; used for checkpoints and gathered outputs of fused layers."""

    @wraps(gather)
    def gather_fused_qkv(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with _cuda_stays_here(qkv):
            return gather(qkv, *args, **kwargs)

    return gather_fused_qkv


def _resetting_here(reset: Callable[..., None]) -> Callable[..., None]:
    """``reset_parameters`` of a row-parallel layer, which broadcasts its bias from the GPU."""

    @wraps(reset)
    def reset_parameters(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if layer.bias is None:
            return reset(layer, *args, **kwargs)
        with _cuda_stays_here(layer.bias):
            return reset(layer, *args, **kwargs)

    return reset_parameters


def _forking_one_state(fork: Callable[..., AbstractContextManager[None]]) -> Callable[..., Any]:
    """``Randomizer.fork_rng`` for one generator. The original saves the states of the device and of the CPU, here the
    same, and restores them in that order, so the randomizer's state would remain as the global one."""

    @wraps(fork)
    def fork_rng(randomizer: Randomizer, enable_cpu: bool = False) -> AbstractContextManager[None]:
        return fork(randomizer)

    return fork_rng


def _accumulating(weight_gradient: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor | None]:
    """A zero-bubble schedule's deferred weight gradient, added to the gradient that is passed to it: the fused kernels
    of apex, which need a GPU, add to ``dW``; Colossal-AI's plain product ignores it."""

    def add(x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor | None = None) -> torch.Tensor | None:
        increment = weight_gradient(x, dy)
        return increment if dw is None else dw.add_(increment)

    return add


def patch_layers() -> None:
    qkv_fused_linear.gather_fused_qkv_in_gpt2_style = _gathering_here(qkv_fused_linear.gather_fused_qkv_in_gpt2_style)
    for layer in (Linear1D_Row, FusedLinear1D_Row, GPT2FusedLinearConv1D_Row):
        layer.reset_parameters = _resetting_here(layer.reset_parameters)
    Randomizer.fork_rng = _forking_one_state(Randomizer.fork_rng)

    put = WeightGradStore.put

    def put_accumulating(x: torch.Tensor, dy: torch.Tensor, weight: Any, weight_gradient: Callable[..., Any]) -> None:
        put(x, dy, weight, _accumulating(weight_gradient))

    WeightGradStore.put = staticmethod(put_accumulating)


# Models --------------------------------------------------------------------------------------------------------------


def _set_device(device: Any) -> None:
    """Do nothing: ``torch.cuda.set_device`` raises for a CPU, whose only device is always the current one."""


def patch_models() -> None:
    for name in ("gpt2", "gptj", "opt", "t5"):
        with suppress(ImportError):  # of names that newer versions of transformers do not have
            model: Any = importlib.import_module(f"colossalai.shardformer.modeling.{name}")
            model.torch = ModuleProxy(torch, cuda=ModuleProxy(torch.cuda, set_device=_set_device))


# Zero ----------------------------------------------------------------------------------------------------------------


def _check_parameters(optimizer: LowLevelZeroOptimizer) -> None:
    """``_sanity_checks`` that does not require a GPU or NPU, and turns off overlapped communication, which needs a
    second stream (this package's plugins overlap in another way). Called before the constructor uses its arguments."""
    optimizer._overlap_communication = False
    for group in optimizer.optim.param_groups:
        for parameter in group["params"]:
            if parameter.dtype != optimizer._dtype and not getattr(parameter, "skip_zero_check", False):
                raise ValueError(
                    f"ZeRO needs all parameters to have one dtype: the first has {optimizer._dtype}, "
                    f"one of shape {tuple(parameter.shape)} is {parameter.dtype}"
                )


def patch_zero() -> None:
    LowLevelZeroOptimizer._sanity_checks = _check_parameters


@cache
def patch_colossalai() -> None:
    patch_point_to_point()
    patch_collectives()
    patch_layers()
    patch_models()
    patch_zero()
