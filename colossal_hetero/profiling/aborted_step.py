"""Make ZeRO's optimizer and FSDP usable again after a training step that did not finish. They cannot undo partly filled
buckets, gathered parameters and hooks themselves, because in normal training such an error ends the run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState

from ..colossalai_support.accelerator import get_accelerator

# isort: split
from colossalai.interface import OptimizerWrapper
from colossalai.zero.low_level import LowLevelZeroOptimizer


def abort_step(model: nn.Module, optimizer: torch.optim.Optimizer | OptimizerWrapper | None = None) -> None:
    """Make ``model`` and ``optimizer`` ready for the next forward pass, at whatever point the last step stopped.
    Gradients from before it may contain a part of its own. FSDP shards its parameters again."""
    get_accelerator().synchronize()
    zero = find_zero_optimizer(optimizer)
    if zero is not None:
        _empty_buckets(zero)
    shards = FullyShardedDataParallel.fsdp_modules(model)
    for shard in shards:
        if shard._is_root is not None:  # it has run before
            _abort(shard)


def find_zero_optimizer(optimizer: Any) -> LowLevelZeroOptimizer | None:
    """The optimizer of ZeRO stage 1 or 2 among ``optimizer`` and those that it wraps; None if there is none."""
    while isinstance(optimizer, OptimizerWrapper):
        if isinstance(optimizer, LowLevelZeroOptimizer):
            return optimizer
        optimizer = optimizer.optim
    return None


def _empty_buckets(zero: LowLevelZeroOptimizer) -> None:
    if zero.require_grad_sync:  # otherwise these gradients are the accumulated ones
        for parameters in zero._working_param_groups.values():
            for parameter in parameters:
                parameter.grad = None
    zero.zero_bucket_stores()


@torch.no_grad()
def _abort(shard: Any) -> None:  # FullyShardedDataParallel, whose inner state has no types
    """Do what FSDP does at the end of a backward pass, without assuming that the pass is complete."""
    shard.training_state = TrainingState.IDLE
    if shard._is_root:
        shard._post_backward_callback_queued = False
        order = shard._exec_order_data
        order._iter = order.current_order_index = 0
        order.handles_pre_forward_order.clear()
        order.handles_post_forward_order.clear()
        shard._free_event_queue._queue.clear()
    handle = shard._handle
    if handle is None:
        return
    handle._training_state = HandleTrainingState.IDLE
    handle._ran_pre_backward_hook = handle._prefetched = False
    handle._needs_pre_backward_unshard = handle._needs_pre_forward_unshard = False
    handle._pre_forward_order_index = handle._post_forward_index = None
    handle.reshard(handle.uses_sharded_strategy)
    handle.post_reshard()
    if handle._uses_param_mixed_precision and handle.uses_sharded_strategy:
        handle._free_low_precision_sharded_param()

    parameter = handle.flat_param
    if hasattr(parameter, "_post_backward_hook_state"):
        parameter._post_backward_hook_state[-1].remove()
        del parameter._post_backward_hook_state
    parameter._post_backward_called = False
    if handle._use_orig_params:
        parameter._tensors[:] = [None] * len(parameter._tensors)  # views that keep the graph of the forward pass
    handle._reset_flat_param_grad_info_if_needed()  # after `zero_grad`, FSDP does this in the next forward pass
    if hasattr(parameter, "_saved_grad_shard"):
        saved = parameter._saved_grad_shard
        del parameter._saved_grad_shard
        parameter.grad = None
        parameter.grad = saved
    elif parameter.grad is not None and parameter.grad.shape != parameter.shape and shard._sync_gradients:
        parameter.grad = None
    else:
        return
    if handle._use_orig_params:
        handle._use_sharded_grad_views()
