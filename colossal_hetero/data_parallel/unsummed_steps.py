"""Optimizer steps with gradients that are not the sums over ranks: made exact, or refused in words. Sums are noted by
model, because its optimizers share its gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed.fsdp._flat_param
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ..common.methods import wrap_method
from ..profiling.preserved_state import inner_optimizer

# [Note: guarded gradients] After a backward pass, ``parameter.grad`` may lack micro-batches of the global batch, or
# differ among ranks (ZeRO). A loop that computes with it would train to other weights. So these gradients get a class,
# :class:`GuardedGradient`, that refuses all functions of torch which read or change values. Parameters whose gradient
# is somewhere else (stages 1 and 2) get an empty one, because loops take a parameter without one for unused. Gradients
# are plain for FSDP, for this package, and in forward passes, where torch may compile something. If a loop has removed
# all or set them to zero, it has called ``zero_grad`` of a module; other changes are refused.


CLIPPING = "optimizer.clip_grad_by_norm() and optimizer.clip_grad_by_value() are exact at every stage"

_PROPERTIES = ("shape", "dtype", "device", "ndim", "grad_fn", "requires_grad", "is_leaf", "is_sparse")
_WITHOUT_VALUES: set[Any] = {getattr(Tensor, name).__get__ for name in _PROPERTIES}
_WITHOUT_VALUES |= {Tensor.size, Tensor.numel, Tensor.dim, Tensor.requires_grad_, Tensor.detach_}


class GuardedGradient(Tensor):
    """A gradient that must not be used; see [Note: guarded gradients]."""

    reason: str
    is_zero: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__")
        if func in _WITHOUT_VALUES or caller == torch.distributed.fsdp._flat_param.__name__:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.zero_:
            args[0].is_zero = True
            return args[0]
        reason = next(leaf.reason for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GuardedGradient))
        raise RuntimeError(f"the gradient of a parameter cannot be used here: {reason}")


_Guarded = tuple[str, Tensor, Tensor | None, int]
"""Name of a parameter, the parameter, its gradient, and the version of that."""


class GradientGuard:
    """Guards the gradients of parameters; see [Note: guarded gradients]."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._parameters = list(parameters)
        self._guarded: list[_Guarded] = []
        self._reason = ""

    def close(self, reason: str, *, fill: bool) -> None:
        """Guard the present gradients. With ``fill``, trained parameters without one get an empty one."""
        self.open(check=False)
        self._reason = reason
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter in self._parameters:
                gradient: Any = parameter.grad
                if gradient is None and fill and parameter.requires_grad:
                    gradient = torch.sparse_coo_tensor(  # type: ignore[call-arg]
                        size=parameter.shape, dtype=parameter.dtype, device=parameter.device, check_invariants=False
                    )
                    parameter.grad = gradient
                version = 0
                if gradient is not None:
                    version = gradient._version
                    gradient.__class__ = GuardedGradient
                    gradient.reason, gradient.is_zero = reason, False
                self._guarded.append((name, parameter, gradient, version))

    def open(self, check: bool = True) -> bool:
        """Make gradients plain; True if the loop has removed or zeroed all. ``check`` refuses other changes."""
        guarded, self._guarded = self._guarded, []
        dropped, changed = [], []
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter, before, version in guarded:
                gradient: Any = before
                now: Any = parameter.grad
                if gradient is None:
                    changed += [name] if now is not None else []
                    continue
                gradient.__class__ = Tensor
                if gradient._version != version or (now is not gradient and now is not None):
                    changed.append(name)
                elif now is None or gradient.is_zero:
                    dropped.append(name)
                parameter.grad = None if gradient.is_sparse and gradient._nnz() == 0 else gradient
        is_dropped = len(dropped) == sum(gradient is not None for _, _, gradient, _ in guarded) > 0
        if check and (changed or (dropped and not is_dropped)):
            raise RuntimeError(f"the gradient of {(changed or dropped)[0]} was replaced or removed, but {self._reason}")
        return is_dropped


class _NotedSums:
    def __init__(self, counted_again: str | None) -> None:
        self.counted_again = counted_again
        """Reason why a sum counts earlier gradients again, in words; None if it does not."""
        self.optimizers: WeakSet[OptimizerWrapper] = WeakSet()
        self.summed: WeakSet[OptimizerWrapper] = WeakSet()  # only known with ``counted_again``
        self.summed_twice: WeakSet[OptimizerWrapper] = WeakSet()
        self.unsummed: WeakSet[OptimizerWrapper] = WeakSet()  # gradients that the last passes have not summed
        self.guards: WeakKeyDictionary[OptimizerWrapper, GradientGuard] = WeakKeyDictionary()
        """Guards of ZeRO's optimizers, on one parameter of every group, which is enough for functions of all."""
        self.sharded: WeakSet[OptimizerWrapper] = WeakSet()  # summed gradients in shards, not in ``parameter.grad``
        self._forwards = 0

    def open_gradients(self, *_: Any) -> None:
        """Let the package use ``parameter.grad``, until :meth:`close_gradients`."""
        for guard in self.guards.values():
            if guard.open():
                raise RuntimeError(
                    "gradients were removed or set to zero after a backward pass, but at ZeRO stages 1 and 2 they are "
                    "in shards, which only optimizer.zero_grad() removes"
                )

    def close_gradients(self, *_: Any) -> None:
        """Refuse functions of ``parameter.grad``, which is None: clipping by torch would do nothing."""
        words = f"at ZeRO stages 1 and 2 each rank has another part of it; {CLIPPING}"
        for optimizer in self.sharded:
            self.guards[optimizer].close(words, fill=True)

    @contextmanager
    def opened_gradients(self) -> Iterator[None]:
        self.open_gradients()
        try:
            yield
        finally:
            self.close_gradients()

    def note_sum(self, is_summed: bool) -> None:
        """Note that the next pass sums the gradients of all parameters of the model over ranks, or not."""
        self.summed = WeakSet(each for each in self.summed if _has_gradients(each))
        if is_summed:
            self.summed_twice.update(self.summed)
            self.summed.update(self.optimizers)

    def count_forward(self, replica: DistributedDataParallel, _: Any) -> None:
        """Count a forward pass since the last backward pass; twice in ``no_sync``, where DDP expects none."""
        if torch.is_grad_enabled():
            self._forwards += 1 if replica.require_backward_grad_sync else 2

    def prepare(self, replica: DistributedDataParallel, loss: Any) -> None:
        """Let DDP sum gradients in each next backward pass outside ``no_sync``, not only in the first after forward."""
        forwards, self._forwards = self._forwards, 0
        if forwards == 1 or not replica.require_backward_grad_sync or _is_unfinished(replica):
            return
        if replica.static_graph:
            raise RuntimeError(
                "with static_graph=True, DDP sums gradients only if there is one backward pass after each forward "
                "pass, both outside no_sync() or both inside; use find_unused_parameters=True instead"
            )
        prepare_sums(replica, loss)


_sums: WeakKeyDictionary[nn.Module, _NotedSums] = WeakKeyDictionary()


def refuse_unsummed_steps(
    model: ModelWrapper,
    optimizer: OptimizerWrapper,
    *,
    in_pipeline: bool,
    in_shards: bool = False,
    counted_again: str | None = None,
) -> None:
    """Let ``optimizer.step`` raise ``RuntimeError`` if the last backward pass ran inside ``no_sync``: ranks would
    update with different gradients, and ZeRO with none."""
    replica = None if in_pipeline else replica_of(model, optimizer)
    if model not in _sums:
        _sums[model] = _NotedSums(counted_again)
        if replica is not None:
            replica.register_forward_pre_hook(_sums[model].count_forward)
    sums = _sums[model]
    sums.optimizers.add(optimizer)
    if in_shards:
        _guard_shards(sums, model, optimizer)

    def run_pass(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with noted_passes(model, optimizer):
            if replica is not None:
                sums.prepare(replica, args[0] if args else kwargs.get("loss", kwargs.get("tensor")))
            return function(*args, **kwargs)

    def step_if_summed(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if optimizer in sums.unsummed:
            raise RuntimeError(
                "optimizer.step() was called, but the last backward pass ran inside no_sync(), so the ranks have "
                "different gradients; the last backward pass before a step must run outside no_sync()"
            )
        if optimizer in sums.summed_twice:
            raise RuntimeError(
                f"gradients of an earlier pass were summed over ranks, and with {sums.counted_again} the latest sum "
                "has counted them again; run all passes of a step but the last inside no_sync()"
            )
        with sums.opened_gradients():
            return step(*args, **kwargs)

    def drop(zero_grad: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for those in (sums.unsummed, sums.sharded, sums.summed, sums.summed_twice):
            those.discard(optimizer)
        if optimizer in sums.guards:
            sums.guards[optimizer].open(check=False)
        return zero_grad(*args, **kwargs)

    for name in () if in_pipeline else ("backward", "backward_by_grad"):
        wrap_method(optimizer, name, run_pass)
    wrap_method(optimizer, "step", step_if_summed)
    wrap_method(optimizer, "zero_grad", drop)


def replica_of(model: ModelWrapper, optimizer: OptimizerWrapper) -> DistributedDataParallel | None:
    """DDP that sums the gradients of ``model`` in backward passes; None if something else does, or nothing."""
    replica = model.module
    if not isinstance(replica, DistributedDataParallel) or hasattr(optimizer, "require_grad_sync"):
        return None
    return replica if replica.process_group.size() > 1 else None


@contextmanager
def noted_passes(model: ModelWrapper, optimizer: OptimizerWrapper) -> Iterator[None]:
    """Note the backward pass, or all passes of a pipeline's batch, in the block (:func:`refuse_unsummed_steps`)."""
    sums = _sums.get(model)
    if sums is None:
        yield
        return
    is_summed = model.require_grad_sync and getattr(optimizer, "require_grad_sync", True)
    if sums.counted_again is not None:
        sums.note_sum(is_summed)
    is_zero = hasattr(optimizer, "require_grad_sync")  # it sums the gradients of one optimizer
    unsummed = list(sums.unsummed) if is_zero else []
    sums.unsummed.update(sums.optimizers)
    with sums.opened_gradients():
        sharded, sums.sharded = sums.sharded, WeakSet()  # a schedule runs forward passes between backward passes
        try:
            yield
        finally:
            sums.sharded = sharded
        if not is_summed:
            return
        sums.unsummed = WeakSet(each for each in unsummed if each is not optimizer)
        if optimizer in sums.guards:
            sharded.add(optimizer)


def _guard_shards(sums: _NotedSums, model: ModelWrapper, optimizer: Any) -> None:
    """Guard ``parameter.grad`` from a backward pass to ``zero_grad``; see [Note: guarded gradients]."""
    if not sums.guards:
        model.register_forward_pre_hook(sums.open_gradients)
        model.register_forward_hook(sums.close_gradients, always_call=True)
    names = {id(value): name for name, value in model.named_parameters()}
    groups = [[each for each in group if each.requires_grad] for group in optimizer._working_param_groups.values()]
    firsts = [group[0] for group in groups if group]
    sums.guards[optimizer] = GradientGuard((names.get(id(each), "a parameter"), each) for each in firsts)
    for name in ("clip_grad_by_norm", "clip_grad_by_value"):
        setattr(optimizer, name, sums.opened_gradients()(getattr(optimizer, name)))


def prepare_sums(replica: DistributedDataParallel, loss: Tensor) -> None:
    """Let DDP sum gradients in the next backward pass, of ``loss``: it expects one after each forward pass."""
    replica.reducer._rebuild_buckets()  # as before a forward pass
    replica.reducer.prepare_for_backward([loss] if replica.find_unused_parameters else [])


def _has_gradients(optimizer: Any) -> bool:
    """True if ``optimizer`` has gradients that are not zero, which ``model.zero_grad()`` may have made them."""
    own = optimizer.param_info["param2id"]
    gradients = [each.grad for each in optimizer.model.parameters() if id(each) in own and each.grad is not None]
    return bool(gradients) and bool(torch.stack([each.any() for each in gradients]).any())


def refuse_unfinished_sums(replica: DistributedDataParallel, optimizer: Any) -> None:
    """Let forward passes and steps raise ``RuntimeError`` if DDP waits for a parameter that this rank has not used."""
    replica.register_forward_pre_hook(_check_sums)
    inner_optimizer(optimizer).register_step_pre_hook(functools.partial(_check_sums, replica))


def _check_sums(replica: DistributedDataParallel, *_: Any) -> None:
    if _is_unfinished(replica):
        unused = ", ".join(name for name, value in replica.module.named_parameters() if value.grad is None)
        raise RuntimeError(
            f"this rank has not used all parameters in the last backward pass ({unused or 'used in earlier ones'}), so "
            "gradients are not summed over ranks; give the plugin find_unused_parameters=True, or use ZeRO stage 1, "
            "which needs no such option"
        )


def _is_unfinished(replica: DistributedDataParallel) -> bool:
    with suppress(RuntimeError):
        replica._check_reducer_finalized()
        return False
    return True
