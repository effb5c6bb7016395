"""Batch normalization over the micro-batches of all ranks, each sample with the same weight. torch's ``SyncBatchNorm``
runs on GPUs only, and would count the placeholder samples of a rank without samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ..common.ranks import world_timeout

Samples = Callable[[], int | None]
"""Samples of this rank's current micro-batch; 0 for placeholders, None outside of training."""


class SampleWeightedBatchNorm(_NormBase):
    """Normalizes ``[N, C, ...]`` by mean and variance over the samples of all ranks in the same micro-step. Parameters,
    buffers, their names and evaluation are those of the replaced module. All ranks must run equally many micro-batches.
    Gradients are those of one process with all samples, if each rank weights its loss by its samples, because those of
    mean and variance are summed over ranks."""

    waits_for_ranks = True
    """See :class:`.forward_timer.ForwardTimer`."""

    def __init__(self, module: _BatchNorm, samples: Samples, group: Any) -> None:
        super().__init__(module.num_features, module.eps, module.momentum, False, False)
        self.affine, self.track_running_stats = module.affine, module.track_running_stats
        self.weight, self.bias = module.weight, module.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self._buffers[name] = getattr(module, name)
        self.training = module.training
        self._samples = samples
        self._group = group

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return F.batch_norm(
                inputs, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        samples = self._samples() if self.training else None
        dims = [dim for dim in range(inputs.ndim) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(inputs.ndim)]
        values = inputs.float()
        own = values[:0] if samples == 0 else values  # placeholders do not count
        count = torch.tensor([own.numel() / max(inputs.shape[1], 1)], device=inputs.device)
        if self.training:
            dist.all_reduce(count, group=self._group)
        if count.item() <= 1 and samples is not None:
            raise ValueError(
                "Expected more than 1 value per channel when training, got 1 over all ranks; use larger micro-steps"
            )
        mean = self._over_ranks(own.sum(dims)) / count
        variance = self._over_ranks((own - mean.view(shape)).square().sum(dims)) / count
        if self.training:
            self._update(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        result = (values - mean.view(shape)) * torch.rsqrt(variance.view(shape) + self.eps)
        if self.weight is not None:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(inputs.dtype)

    def _over_ranks(self, value: Tensor) -> Tensor:
        return _SumOverRanks.apply(value, self._group) if self.training else value  # type: ignore[no-any-return]

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def synchronize_batch_norm(model: nn.Module, samples: Samples) -> nn.Module:
    """Replace all batch normalizations in ``model``, which must not be wrapped yet. Every rank calls it. Returns
    ``model``, or the new module if ``model`` itself is one."""
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return model
    # A group of their own, because gradients are summed over the other groups at the same time.
    group = dist.new_group(timeout=world_timeout())
    replaced: dict[nn.Module, nn.Module] = {}

    def replacement(module: nn.Module) -> nn.Module:
        if isinstance(module, _BatchNorm):
            return replaced.setdefault(module, SampleWeightedBatchNorm(module, samples, group))
        for name, child in list(module._modules.items()):
            if child is not None:
                module._modules[name] = replacement(child)
        return module

    return replacement(model)
