"""ZeRO's optimizer, stages 1 and 2, whose communication overlaps with passes (Holmes; docs/how-it-works.md).

Each rank gets the shard of gradients that its optimizer uses (:mod:`.gradient_sums`), in stage 1 too, where Colossal-AI
sums whole gradients: that halves the communication. Collectives are started with ``async_op=True``: NCCL's ``wait``
makes the stream wait and not the host. Colossal-AI uses a second stream instead, which a CPU lacks, and for which, with
a pipeline, nothing waits before the step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress
from typing import Any
from weakref import proxy

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ...colossalai_support.accelerator import get_accelerator
from ...colossalai_support.corrections import replaced

# isort: split
from colossalai.booster.plugin import hybrid_parallel_plugin, low_level_zero_plugin
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelZeroOptimizer
from colossalai.pipeline.schedule import ZeroBubbleVPipeScheduler
from colossalai.zero.low_level import LowLevelZeroOptimizer

from .gradient_sums import GradientBucket, GradientSums, divided, scatter_gradients
from .late_parameters import LateParameters, UpdatedParameter


class OverlappedZeroOptimizer(LowLevelZeroOptimizer):
    """``LowLevelZeroOptimizer`` whose communication overlaps with computation. The ranks form one group."""

    grad_handles: Any = ()  # of an optimizer whose state was released, for the parent's ``__del__``

    def __init__(
        self,
        optimizer: Optimizer,
        *args: Any,
        overlap_communication: bool = False,
        overlap_allgather: bool = False,
        partition_grad: bool = False,
        **kwargs: Any,
    ) -> None:
        self.late_parameters: LateParameters | None = LateParameters() if overlap_allgather else None
        self._reduces_early = overlap_communication or partition_grad
        self._clip_factor, self._clip_value = 1.0, math.inf
        self._may_accumulate = not partition_grad
        self._has_order = False
        first = optimizer.param_groups[0]["params"]
        if not first:
            # The parent asks the first parameter for its type, and leaves out those that are frozen.
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            first.append(Parameter(torch.empty(0, dtype=trained[0].dtype if trained else None), requires_grad=False))
        # With shards of gradients the parent calls `_attach_reduction_hook` and uses what the buckets deliver.
        super().__init__(
            optimizer,
            *args,
            overlap_communication=False,
            overlap_allgather=False,
            partition_grad=True,
            **kwargs,
        )

    def _withheld(self) -> set[int]:
        """``id`` of parameters whose gradients change between the last backward pass and ``_sync_grad``."""
        return set()

    def _attach_reduction_hook(self) -> None:
        parameters = [parameter for group in self._working_param_groups.values() for parameter in group]
        # Backward passes compute gradients in about this order.
        self._order = self._withheld_last(reversed(parameters))
        self._start_sum = functools.partial(
            scatter_gradients, deliver=self._deliver_to_stores(), dtype=self._communication_dtype, divide=True
        )
        # For one rank there is nothing to send, and DDP, in which the hybrid plugin then wraps the model, sets
        # gradients once more at the end of a pass.
        is_early = self._reduces_early and dist.get_world_size(self._group()) > 1
        withheld = self._withheld()
        watched = [each for each in parameters if is_early and id(each) not in withheld]
        self.sums = GradientSums(self._buckets(), self._start_sum, watched, one_group=True)
        self.grad_handles.extend(self.sums.hooks)

    def _withheld_last(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        withheld = self._withheld()
        return sorted(parameters, key=lambda parameter: id(parameter) in withheld)

    def _buckets(self) -> list[GradientBucket]:
        parts = divided(self._order, lambda each: each.dtype, Parameter.numel, self._reduce_bucket_size)
        return [GradientBucket(self._group(), tuple(each)) for each in parts]

    def _deliver_to_stores(self) -> Callable[[Parameter, Tensor], None]:
        working = self._working_param_groups
        group_of = {id(parameter): number for number, group in working.items() for parameter in group}
        this = proxy(self)
        return lambda parameter, shard: this._add_grad(shard, 1, group_of[id(parameter)], id(parameter))

    def _group(self) -> dist.ProcessGroup:
        (group,) = self.pg_to_param_list
        return group

    def _sync_grad(self, *_: Any) -> None:
        self.sums.finish()

    _reduce_grad = _sync_grad

    def zero_grad_stores(self) -> None:
        # First, because sums that have been started may still deliver.
        self.sums.drop()
        super().zero_grad_stores()
        self._clip_factor, self._clip_value = 1.0, math.inf

    def clip_grad_by_value(self, clip_value: float, *args: Any, **kwargs: Any) -> None:
        """Limit the elements of the gradients in the next step, which removes the loss scale first."""
        if self._clip_grad_norm > 0:
            raise ValueError(f"gradients cannot be clipped by value and by max_norm={self._clip_grad_norm}; use one")
        self._clip_value = min(self._clip_value, clip_value)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Limit the norm of all gradients in the next step, and return it. Called by all ranks at once."""
        if norm_type != 2.0:
            raise ValueError(f"norm_type={norm_type} is not available in ZeRO stages 1 and 2, which clip by the 2-norm")
        if self._clip_value < math.inf:
            raise ValueError("ZeRO stages 1 and 2 clip gradients by their norm first, and then by value")
        self._complete_sums()
        norms = [
            sum(
                self._compute_grad_norm(store.torch_pg, store.get_working_grads_by_group_id(group))
                for store in self.pg_to_grad_store.values()
            )
            for group in range(self.num_param_groups)
        ]
        norm = math.hypot(*norms) / getattr(self.mixed_precision_mixin, "loss_scale", 1.0) * self._clip_factor
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the gradients' norm is {norm}: they cannot be clipped")
        factor = max_norm / (norm + 1e-6)
        self._clip_factor *= 1.0 if factor >= 1 else factor
        return torch.tensor(norm, device=get_accelerator().get_current_device())

    def _unscale_and_clip_grads(self, grad_groups_flat: list[Tensor], total_norm: float) -> None:
        super()._unscale_and_clip_grads(grad_groups_flat, total_norm * self._clip_factor)
        for gradient in grad_groups_flat:
            if self._clip_factor != 1:
                gradient.mul_(self._clip_factor)
            if self._clip_value < math.inf:
                gradient.clamp_(-self._clip_value, self._clip_value)

    @contextmanager
    def _own_pass(self) -> Iterator[None]:
        """A block for a backward pass of this optimizer, not of another one of the model. Stage 1 may run it without
        synchronization: whole gradients accumulate, which the parent refuses if gradients are sharded."""
        sharded = self._partition_grads and (self.require_grad_sync or not self._may_accumulate)
        is_only_pass = self.require_grad_sync and not self.sums.accumulating
        with (
            replaced(self, _partition_grads=sharded),
            self.sums.passes(lambda: 1) if is_only_pass else nullcontext(),
            self.sums.one_pass(),
        ):
            yield

    def backward(self, loss: Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        with self._own_pass():
            super().backward(loss, inputs=inputs, retain_graph=retain_graph)

    def backward_by_grad(self, tensor: Tensor, grad: Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        with self._own_pass():
            super().backward_by_grad(tensor, grad, inputs=inputs, retain_graph=retain_graph)

    def _before_step(self) -> None:
        """Complete the sums. At the first step, order the buckets as rank 0 got its gradients; others come last."""
        self._complete_sums()
        if self._has_order or not self._order:
            return
        self._has_order = True
        places = {key: place for place, key in enumerate(self.sums.passes_of)}
        order = torch.tensor([places.get(id(each), len(places)) for each in self._order], device=self._order[0].device)
        dist.broadcast(order, dist.get_global_rank(self._group(), 0), group=self._group())
        found = dict(zip(self._order, order.tolist(), strict=True))
        self._order = self._withheld_last(sorted(self._order, key=found.__getitem__))
        self.sums.arrange(self._buckets())

    def _complete_sums(self) -> None:
        """Sum gradients that came after their sum, and drop those of parameters that no rank has used; see [Note:
        unused parameters]. Called by all ranks at once."""
        parameters, sums = self._order, self.sums
        if parameters:
            known = [[id(each) in keys for each in parameters] for keys in (sums.used, sums.late)]
            found = torch.tensor(known, dtype=torch.int32).to(parameters[0].device)
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group())
            is_used, is_late = found.tolist()
            late = tuple(compress(parameters, is_late))
            if late:
                self._start_sum(GradientBucket(self._group(), late))()
                sums.late.clear()
            if any(is_used):  # otherwise nothing was summed
                self._forget(each for each, used in zip(parameters, is_used, strict=True) if not used)
        if any(parameter.grad is not None for parameter in parameters):
            raise RuntimeError(
                "with ZeRO, gradients are summed over ranks in the backward pass of their own optimizer, but a "
                "parameter of this one got its gradient in another pass: call booster.backward(loss, optimizer) with "
                "the optimizer that steps, or use zero_stage=0, where one backward pass serves several optimizers"
            )

    def _forget(self, unused: Iterable[Parameter]) -> None:
        for parameter in unused:
            for gradients in self.pid_to_grad_store[id(parameter)]._grads_of_params.values():
                gradients.pop(id(parameter), None)

    def step(self, closure: Any = None) -> None:
        if not self.require_grad_sync:
            return
        self._before_step()
        if self.late_parameters is None:
            super().step(closure)
            return
        self.late_parameters.wait()
        updated: list[Tensor] = []

        def take(optimizer: Any, *_: Any) -> None:  # the parent gathers the shards that it finds, and then restores all
            for group in optimizer.param_groups:
                updated.extend(group["params"])
                group["params"] = []

        hook = self.optim.register_step_post_hook(take)
        try:
            super().step(closure)
        finally:
            hook.remove()
        self.late_parameters.start(self._in_forward_order(updated), self._group())

    def _in_forward_order(self, shards: list[Tensor]) -> list[UpdatedParameter]:
        device = get_accelerator().get_current_device()
        found: dict[int, UpdatedParameter] = {}
        for shard in shards:
            parameter = self.master_to_working_param[id(shard)]
            padded = self._working_param_to_padded_working_param[parameter]
            found[id(parameter)] = UpdatedParameter(parameter, shard.to(device).to(self._dtype), padded)
        # Backward passes use parameters in the reverse order of forward passes.
        return [found[id(each)] for each in reversed(self._order) if id(each) in found]

    def _force_wait_all_gather(self) -> None:
        if self.late_parameters is not None:
            self.late_parameters.wait()


class OverlappedHybridZeroOptimizer(HybridParallelZeroOptimizer, OverlappedZeroOptimizer):
    _sums_sequence = False  # gradients must be summed over the parts of sequences before the step

    def _withheld(self) -> set[int]:
        """Parameters that pipeline stages share: their gradients are summed over the stages first."""
        if self.stage_manager is None:
            return set()
        stage = self.stage_manager.stage
        return {id(shared[stage]) for shared in self.shared_params if stage in shared}

    def _sync_sp_grads(self) -> None:
        # Before the step, once: the parent sums over the tensor-parallel group what earlier passes have summed there.
        self._sums_sequence = True

    def _complete_sums(self) -> None:
        super()._complete_sums()
        if self._sums_sequence:
            self._sums_sequence = False
            super()._sync_sp_grads()

    def zero_grad_stores(self) -> None:
        super().zero_grad_stores()
        self._sums_sequence = False


def summing_in_passes(schedule: Any, optimizer: Any) -> AbstractContextManager[None]:
    """A context for the passes of a batch in a pipeline, which sum gradients if the optimizer is overlapped: not if the
    schedule computes gradients of weights outside of backward passes (zero-bubble), if sequence parallelism sums over
    other ranks before, or if a later batch accumulates more."""
    if (
        not isinstance(optimizer, OverlappedHybridZeroOptimizer)
        or isinstance(schedule, ZeroBubbleVPipeScheduler)
        or optimizer.model.shard_config.enable_sequence_parallelism
        or not (optimizer.require_grad_sync and optimizer.model.require_grad_sync)
    ):
        return nullcontext()
    # The attribute has another name in each kind of schedule. It may be set when the passes begin.
    return optimizer.sums.passes(lambda: getattr(schedule, "num_microbatches", None) or schedule.num_microbatch)


def split_off_overlap(
    arguments: Mapping[str, Any],
) -> tuple[dict[str, Any], Callable[[], AbstractContextManager[None]]]:
    """Arguments for Colossal-AI's plugin (its own optimizer for 8-bit messages), and a context for ``configure``."""
    if not arguments.get("zero_stage") or arguments.get("fp8_communication"):
        return dict(arguments), nullcontext
    late = bool(arguments.get("overlap_allgather"))
    return {**arguments, "overlap_allgather": False}, functools.partial(overlapped_optimizers, late)


@contextmanager
def overlapped_optimizers(overlap_allgather: bool) -> Iterator[None]:
    """In the block, Colossal-AI's plugins make overlapped optimizers."""

    def make(kind: type[OverlappedZeroOptimizer]) -> Callable[..., OverlappedZeroOptimizer]:
        return lambda *args, **kwargs: kind(*args, **{**kwargs, "overlap_allgather": overlap_allgather})

    with (
        replaced(low_level_zero_plugin, LowLevelZeroOptimizer=make(OverlappedZeroOptimizer)),
        replaced(hybrid_parallel_plugin, HybridParallelZeroOptimizer=make(OverlappedHybridZeroOptimizer)),
    ):
        yield
