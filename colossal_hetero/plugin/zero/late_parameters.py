"""Parameters that are gathered while the next forward pass computes with earlier ones (Holmes, Yang et al. 2023).

[Note: late parameters] While a parameter is gathered, its class is a subclass, :class:`LateParameter`. A function of
torch that reads its values first waits for it; then the parameter has its own class again. So it does not matter who
reads it: its layer, another layer, a checkpoint, or a copy of the model. Only a tensor that was made of its memory
before, such as ``parameter.data``, does not wait. On a GPU, only the stream of the reader waits. So until the gather
has ended, a parameter keeps its subclass for readers on other streams; functions of torch get it with its own class.

Kernels of other packages may read memory without a function of torch, so a module also waits for its own parameters
before its forward pass. ``torch.compile`` would compile again after each step, so compiled modules are refused.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

SMALL = 1 << 16  # parameters with fewer elements are gathered together with others

_PROPERTIES = ("grad", "requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "is_cuda")
_METHODS = (
    *("size", "numel", "nelement", "dim", "ndimension", "stride", "element_size", "is_floating_point", "is_complex"),
    *("is_contiguous", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
)
_WITHOUT_VALUES: set[Any] = {
    *(getattr(getattr(Tensor, name), method) for name in _PROPERTIES for method in ("__get__", "__set__")),
    *(getattr(Tensor, name) for name in _METHODS),
    torch.numel,
    torch.is_floating_point,
}
"""Functions that do not read the values of a tensor, such as those of ``zero_grad``."""


class LateParameter:
    """Class of a parameter while it is gathered; see [Note: late parameters]."""

    late_gather: _Gather

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with _reading(tree_leaves((args, kwargs))):
            return func(*args, **kwargs)

    # torch's own methods ask for the class of the parameter before they read its values.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _reading([self]):
            return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _reading([self]):
            return self.__reduce_ex__(protocol)


@contextmanager
def _reading(values: Iterable[Any]) -> Iterator[None]:
    """A block that reads the values of parameters, which have their own classes there."""
    late = []
    try:
        for each in values:
            if isinstance(each, LateParameter):
                late.append((each, each.late_gather))
                each.late_gather.wait()
                _set_own(each)
        yield
    finally:
        for parameter, gather in late:
            if not gather.has_ended:
                _set_late(parameter, gather)


def _set_late(parameter: Any, gather: _Gather) -> None:
    parameter.late_gather = gather
    parameter.__class__ = _late(type(parameter))  # type: ignore[arg-type]


def _set_own(parameter: Any) -> None:
    if isinstance(parameter, LateParameter):
        del parameter.late_gather
        _, parameter.__class__ = type(parameter).__bases__


@functools.cache
def _late(kind: type) -> type:
    return types.new_class(f"Late{kind.__name__}", (LateParameter, kind))


class UpdatedParameter(NamedTuple):
    """A parameter of the model, of which this rank's optimizer has updated a shard."""

    parameter: Parameter
    shard: Tensor  # ``[⌈n/R⌉]`` of n elements on R ranks, in the parameter's type and on its device
    padded: Tensor  # ``[R · ⌈n/R⌉]``: the parameter's memory, and the padding behind it

    @property
    def is_in_place(self) -> bool:
        return self.padded.dtype == self.shard.dtype and self.padded.data_ptr() == self.parameter.data_ptr()


class _Gather:
    """A collective that gathers parameters: a large one in its memory, several small ones through a buffer."""

    def __init__(self, members: Sequence[UpdatedParameter], group: dist.ProcessGroup, owner: LateParameters) -> None:
        self._members, self._owner = members, owner
        self._complete: torch.cuda.Event | None = None
        self._streams: set[torch.cuda.Stream] = set()
        self.has_ended = False
        self._ranks = dist.get_world_size(group)
        self._copies = len(members) > 1 or not members[0].is_in_place
        if self._copies:
            self._sent = torch.cat([each.shard.detach().flatten() for each in members])
            self._received = self._sent.new_empty(self._ranks * self._sent.numel())
        else:
            self._sent, self._received = members[0].shard.detach(), members[0].padded
        self.work = dist.all_gather_into_tensor(self._received, self._sent, group=group, async_op=True)
        self._begin()

    def _begin(self) -> None:
        self.has_ended = False
        self._owner.add(self)
        for each in self._members:
            _set_late(each.parameter, self)

    def end(self) -> None:
        self.has_ended = True
        self._owner.remove(self)
        for each in self._members:
            _set_own(each.parameter)

    @torch.no_grad()
    def wait(self) -> None:
        """Wait, or let the current stream of a GPU wait, until the parameters are complete."""
        if self._complete is None:
            self.end()  # First of all, so that waiting does not begin again if it fails.
            with self._owner.waiting():
                self.work.wait()
            if self._copies:
                sizes = [each.shard.numel() for each in self._members]
                parts = self._received.view(self._ranks, -1).split(sizes, dim=1)
                for each, part in zip(self._members, parts, strict=True):
                    parameter = each.parameter
                    parameter.data.copy_(part.reshape(-1)[: parameter.numel()].view(parameter.shape))
            if not self._received.is_cuda:
                return
            self._complete = torch.cuda.current_stream(self._received.device).record_event()
            self._begin()
        stream = torch.cuda.current_stream(self._received.device)
        if stream not in self._streams:
            stream.wait_event(self._complete)
            self._streams.add(stream)
        if self._complete.query():
            self.end()


class LateParameters:
    """Gathers parameters after a step; see [Note: late parameters]."""

    def __init__(self) -> None:
        self.waiting: Callable[[], AbstractContextManager[Any]] = nullcontext  # a context around each wait, to time it
        self._unfinished: dict[_Gather, None] = {}
        self._hook: RemovableHandle | None = None

    def start(self, updated: Iterable[UpdatedParameter], group: dist.ProcessGroup) -> None:
        """Start to gather parameters, in their order: that in which the next forward pass uses them."""
        for gather in list(self._unfinished):  # for which the step has waited
            gather.end()
        small: list[UpdatedParameter] = []
        for each in updated:
            if each.parameter.numel() < SMALL:
                small.append(each)
                continue
            if small:
                _Gather(small, group, self)
            _Gather([each], group, self)
            small = []
        if small:
            _Gather(small, group, self)

    def wait(self) -> None:
        for gather in list(self._unfinished):
            gather.wait()

    def add(self, gather: _Gather) -> None:
        self._unfinished[gather] = None
        if self._hook is None:
            self._hook = register_module_forward_pre_hook(_wait_for_own_parameters)

    def remove(self, gather: _Gather) -> None:
        self._unfinished.pop(gather, None)
        if not self._unfinished and self._hook is not None:
            self._hook.remove()
            self._hook = None


def _wait_for_own_parameters(module: nn.Module, _: Any) -> None:
    if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
        raise ValueError(
            f"{type(module).__name__} is compiled, but it has parameters that are still gathered, so that it would be "
            "compiled again after each step; use one of overlap_allgather=True and torch.compile"
        )
    for parameter in module._parameters.values():
        if isinstance(parameter, LateParameter):
            parameter.late_gather.wait()
