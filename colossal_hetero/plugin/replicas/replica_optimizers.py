"""The hybrid plugin's model and optimizers, for replicas that are not alike: Colossal-AI's, but gradients are summed
over the holders of each layer, clipped by the norm of the whole model, and all ranks agree before a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from colossalai.booster.plugin import hybrid_parallel_plugin
from colossalai.booster.plugin.hybrid_parallel_plugin import (
    HybridParallelAMPOptimizer,
    HybridParallelModule,
    HybridParallelNaiveOptimizer,
)
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ...colossalai_support.corrections import replaced
from ...common.ranks import slices_held
from ..zero.gradient_sums import all_reduce_gradients, scatter_gradients
from ..zero.overlapped_optimizer import OverlappedHybridZeroOptimizer
from .replica_gradients import (
    NOT_SUMMED,
    Commit,
    GroupFinder,
    ReplicaGradients,
    SharedParameters,
    canonical_names,
    find_shared_buckets,
)


@dataclass(frozen=True)
class Sharing:
    """How gradients are summed over the ranks that share a parameter."""

    find_groups: GroupFinder
    max_elements: int  # of a bucket
    early: bool  # sums start in backward passes
    copies: int = 1  # ranks that hold each part of ZeRO's optimizer state

    def find_buckets(self, model: ReplicaModule, trained: list[Parameter]) -> SharedParameters:
        group = model.tp_group
        return find_shared_buckets(model.names, model.module, trained, group, self.max_elements, self.find_groups)


class ReplicaModule(HybridParallelModule):
    """``HybridParallelModule`` whose gradients are summed over holders, and not by ``DistributedDataParallel``."""

    def __init__(self, module: nn.Module, *args: Any, use_ddp: bool, **kwargs: Any) -> None:
        self.names = canonical_names(module)  # of the whole model
        self.gradients: ReplicaGradients | None = None  # None before the optimizer is configured
        super().__init__(module, *args, use_ddp=False, **kwargs)

    def sync_shared_params(self) -> None:
        """Weights that stages share are parameters with more holders; their gradients are summed with the others."""

    def sync_dp_grads(self) -> None:
        if self.gradients is not None:
            self.gradients.sums.finish()


class ReplicaOptimizer:
    """Common base of the optimizers for replicas that are not alike."""

    gradients: ReplicaGradients
    is_alone = False  # the other ranks are gone: a step is made without them, and leaves parameters for later
    lost: RuntimeError | None = None
    """Error after the last step was made, which has left parameters incomplete; masters have their values."""
    _commit: Commit

    def _check_pass(self) -> None:
        if not self.gradients.sums.accumulating:
            raise RuntimeError(NOT_SUMMED)

    def clip_grad_by_norm(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a rank has only a part of the gradients."""
        raise NotImplementedError(
            "clip_grad_by_norm knows only the gradients of this rank's layers; give the plugin max_norm instead, which "
            "clips by the norm of the whole model"
        )


class _WholeGradients(ReplicaOptimizer):
    model: ReplicaModule

    def backward(self, *args: Any, **kwargs: Any) -> None:
        self._check_pass()
        with self.gradients.sums.one_pass():
            super().backward(*args, **kwargs)  # type: ignore[misc]

    def backward_by_grad(self, *args: Any, **kwargs: Any) -> None:
        self._check_pass()
        with self.gradients.sums.one_pass():
            super().backward_by_grad(*args, **kwargs)  # type: ignore[misc]

    def _share(self, trained: list[Parameter], sharing: Sharing) -> None:
        group, early = self.model.tp_group, sharing.early
        shared = sharing.find_buckets(self.model, trained)
        self.gradients = ReplicaGradients(shared, group, all_reduce_gradients, sharded=False, early=early)
        self.model.gradients = self.gradients

    def _agree(self, needs_norm: bool) -> None:
        self._commit = self.gradients.commit(lambda parameter: parameter.grad, needs_norm)
        for parameter in self.gradients.unused(self._commit):
            parameter.grad = None

    def _compute_grad_norm(self, param_gradient_pairs: Any, norm_type: int = 2) -> float:
        return self._commit.gradient_norm

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.gradients.sums.drop()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]


class ReplicaNaiveOptimizer(_WholeGradients, HybridParallelNaiveOptimizer):
    """``HybridParallelNaiveOptimizer`` (fp32) for replicas that are not alike."""

    def __init__(self, optim: Optimizer, model: ReplicaModule, *args: Any, sharing: Sharing, **kwargs: Any) -> None:
        super().__init__(optim, model, *args, **kwargs)
        self._share(_parameters_of(optim), sharing)

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._agree(self.max_norm > 0)
        super().step(*args, **kwargs)

    def _clip_grad_norm(self, total_norm: float) -> None:
        # The parent class rounds the factor to fp32.
        factor = self.max_norm / (total_norm + 1e-6)
        if factor >= 1:
            return
        for group in self.optim.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.detach().mul_(factor)


class ReplicaAMPOptimizer(_WholeGradients, HybridParallelAMPOptimizer):
    """``HybridParallelAMPOptimizer`` (fp16, bf16) for replicas that are not alike."""

    def __init__(self, optim: Optimizer, model: ReplicaModule, *args: Any, sharing: Sharing, **kwargs: Any) -> None:
        trained = _parameters_of(optim)
        super().__init__(optim, model, *args, **kwargs)
        # From here on, the optimizer's parameters are the master weights.
        self._share(trained, sharing)
        self._is_scaled = _use_committed_overflow(self.mixed_precision, lambda: self._commit.overflow)

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._agree(self.max_norm > 0 or self._is_scaled)
        super().step(*args, **kwargs)


class ReplicaZeroOptimizer(ReplicaOptimizer, OverlappedHybridZeroOptimizer):
    """ZeRO stage 1 for replicas that are not alike: the holders of a layer share its optimizer state.

    [Note: copies of shards] With ``copies=2``, rank r of R holders has shard r of a master and its moments, and also
    shard r + 1 (modulo R), one after the other in the same memory. Both of its holders get the same gradient, and each
    element is updated on its own, so both have the same values after each step. No other message is needed, and if any
    single rank is lost, the others hold everything. A rank sends parameters, and counts the norm, of its first shard.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: ReplicaModule,
        *args: Any,
        sharing: Sharing,
        **kwargs: Any,
    ) -> None:
        self._early, self.copies = sharing.early, sharing.copies
        self._shared = sharing.find_buckets(model, _parameters_of(optimizer))
        by_group: dict[dist.ProcessGroup, list[Parameter]] = {}
        for bucket in self._shared.buckets:
            by_group.setdefault(bucket.group, []).extend(bucket.parameters)
        # With overlap, each rank gets only the shards of gradients that its optimizer uses.
        kwargs |= dict(pg_to_param_list=by_group, dp_process_group=None, overlap_communication=True)
        super().__init__(optimizer, model, *args, **kwargs)
        model.gradients = self.gradients
        if self.copies > 1:
            self.update_master_params(model)
            for name in ("state_dict", "state_dict_shard", "load_state_dict", "get_param_grad"):
                setattr(self, name, partial(_refuse, name))
        self._is_scaled = _use_committed_overflow(self.mixed_precision_mixin, lambda: self._commit.overflow)

    def _attach_reduction_hook(self) -> None:
        deliver, dtype = self._deliver_to_stores(), self._communication_dtype
        start = partial(scatter_gradients, deliver=deliver, dtype=dtype, copies=self.copies)
        self.gradients = ReplicaGradients(self._shared, self.tp_pg, start, sharded=True, early=self._early)
        self.sums = self.gradients.sums

    def _reduce_grad(self, *_: Any) -> None:
        """Nothing in a backward pass: sums end after the passes of a batch."""

    @contextmanager
    def _own_pass(self) -> Iterator[None]:
        self._check_pass()
        with super()._own_pass():
            yield

    def _before_step(self) -> None:
        def shard_of(parameter: Parameter) -> Tensor | None:
            shards = self.pid_to_grad_store[id(parameter)].get_working_grad_by_param_id(id(parameter))
            return None if shards is None else shards[: self._shard_size(parameter)]

        self._commit = self.gradients.commit(shard_of, self._clip_grad_norm > 0 or self._is_scaled)
        self._forget(self.gradients.unused(self._commit))

    def step(self, closure: Any = None) -> None:
        whole: list[tuple[Tensor, Tensor]] = []

        def own_shards(optimizer: Optimizer, *_: Any) -> None:  # the parent class gathers what it finds
            for group in optimizer.param_groups:
                for master in group["params"]:
                    whole.append((master, master.data))
                    master.data = master.data[: self._shard_size(self.master_to_working_param[id(master)])]
                if self.is_alone:
                    group["params"] = []

        self.lost = None
        hook = self.optim.register_step_post_hook(own_shards)
        try:
            super().step(closure)
        except RuntimeError as error:
            if self.copies == 1 or not whole:
                raise
            self.lost = error
        finally:
            hook.remove()
            for master, data in whole:
                master.data = data

    def _shard_size(self, parameter: Parameter) -> int:
        return -(-parameter.numel() // self.pid_to_bucket_store[id(parameter)].world_size)

    def update_master_params(self, model: nn.Module) -> None:
        """Copy parameters to masters, with all shards that this rank holds."""
        if self.copies == 1:
            return super().update_master_params(model)
        for parameter, padded in self._working_param_to_padded_working_param.items():
            store, master = self.pid_to_bucket_store[id(parameter)], self.working_to_master_param[id(parameter)]
            held = slices_held(store.local_rank, store.world_size, self.copies)
            master.data = padded.detach().view(store.world_size, -1)[list(held)].flatten().to(master)

    def _compute_grad_norm(self, dp_pg: Any, gradients: list[Tensor], norm_type: int = 2) -> float:
        return 0.0  # of one group of holders; the norm of the whole model is in the commit

    def _unscale_and_clip_grads(self, grad_groups_flat: list[Tensor], total_norm: float) -> None:
        self._current_grad_norm = self._commit.gradient_norm
        super()._unscale_and_clip_grads(grad_groups_flat, self._commit.gradient_norm)


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        f"{name} takes each shard of the optimizer's state from one rank, but in elastic training two ranks hold it; "
        "use plugin.save and plugin.resume"
    )


def _parameters_of(optimizer: Optimizer) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _use_committed_overflow(mixed_precision: Any, overflow: Callable[[], bool]) -> bool:
    """Let the loss scale follow the overflow that all ranks agree on; returns True if there is a loss scale."""
    if not hasattr(mixed_precision, "check_overflow"):
        return False
    mixed_precision.check_overflow = overflow
    return True


def replica_optimizers(sharing: Sharing) -> AbstractContextManager[None]:
    """In the block, Colossal-AI's hybrid plugin makes models and optimizers for replicas that are not alike."""
    return replaced(
        hybrid_parallel_plugin,
        HybridParallelModule=ReplicaModule,
        HybridParallelNaiveOptimizer=partial(ReplicaNaiveOptimizer, sharing=sharing),
        HybridParallelAMPOptimizer=partial(ReplicaAMPOptimizer, sharing=sharing),
        HybridParallelZeroOptimizer=partial(ReplicaZeroOptimizer, sharing=sharing),
    )
