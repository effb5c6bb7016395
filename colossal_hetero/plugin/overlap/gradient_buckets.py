"""Gradients that are summed over replicas in buckets, while the backward pass computes those of earlier layers.

[Note: order of buckets] All ranks of a group must start the same collectives in the same order, although their
gradients may be ready in different orders, for example if a micro-batch does not use all parameters. So parameters have
one order on all ranks, and a gradient enters a bucket only after those before it. At first the order is that of the
parameters, reversed. From the first step of the optimizer on, it is the order in which rank 0 had its gradients. What
is not ready at the end of the backward pass follows then. So parameters that are not used cost time, but do not change
the result.

Source: Holmes (Yang et al. 2023), overlapped distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

__all__ = ["GradientBuckets"]


class _Launched(NamedTuple):
    """A bucket whose sum over replicas has been started."""

    parameters: list[Parameter]
    shard_sizes: list[int]
    sent: Tensor
    """``[ranks * elements of the shards]``; must not be released before the sum is complete."""
    received: Tensor
    """``[elements of the shards]``, this rank's shards of the mean gradients one after the other."""
    work: dist.Work


class GradientBuckets:
    """Sums gradients over the ranks of a group. Each rank keeps its shard of every mean gradient.

    A gradient of n elements is padded to a multiple of the number of ranks R. Rank r keeps the elements from
    ``r · ⌈n/R⌉`` to ``(r + 1) · ⌈n/R⌉``.

    Args:
        parameters: those with gradients, in an order that is the same on all ranks.
        group: the ranks that the gradients are averaged over.
        max_elements: a bucket is started before it would hold more elements, unless it has only one gradient.
        communication_dtype: type in which gradients are sent; None: their own.
        deliver: called with a parameter and this rank's shard of its mean gradient, ``[⌈n/R⌉]`` in the gradient's
            type, padded with zeros.
        withheld: ``id`` of parameters whose gradients are not complete before :meth:`finish`.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        group: dist.ProcessGroup,
        max_elements: int,
        communication_dtype: torch.dtype | None,
        deliver: Callable[[Parameter, Tensor], None],
        withheld: Collection[int] = (),
    ) -> None:
        self.order: list[Parameter] = _last(withheld, list(reversed(parameters)))
        """The parameters in the order in which they enter buckets."""
        self._parameters = list(parameters)
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._max_elements = max_elements
        self._dtype = communication_dtype
        self._deliver = deliver
        self._withheld = frozenset(withheld)
        self._ready: dict[int, Parameter] = {}
        self._last_ready: list[int] = []
        self._passes: dict[int, int] = {}
        self._next = 0
        self._bucket: dict[int, Parameter] = {}
        self._elements = 0
        self._launched: list[_Launched] = []

    def gradient_ready(self, parameter: Parameter, passes: int = 1) -> None:
        """A backward pass has added to ``parameter.grad``, which is complete after ``passes`` passes."""
        key = id(parameter)
        self._passes[key] = self._passes.get(key, 0) + 1
        if self._passes[key] < passes or key in self._withheld:
            return
        self._ready[key] = parameter
        while self._next < len(self.order) and id(self.order[self._next]) in self._ready:
            self._add(self.order[self._next])
            self._next += 1

    def finish(self) -> None:
        """Start what is left, wait until all sums are complete, and deliver the gradients."""
        for parameter in self.order:
            if parameter.grad is not None and id(parameter) not in self._bucket:
                self._add(parameter)
        self._launch()
        self._last_ready = list(self._ready) or self._last_ready
        launched, self._launched = self._launched, []
        self._reset()
        for bucket in launched:
            bucket.work.wait()
            shards = bucket.received.split(bucket.shard_sizes)
            for parameter, shard in zip(bucket.parameters, shards, strict=True):
                self._deliver(parameter, shard.to(parameter.dtype))

    def drop(self) -> None:
        """Forget the gradients that are not delivered yet. What has been started ends on all ranks."""
        launched, self._launched = self._launched, []
        self._reset()
        for bucket in launched:
            bucket.work.wait()

    def agree_on_order(self) -> None:
        """Use rank 0's order from now on; see [Note: order of buckets]. All ranks call it at the same time."""
        if not self._parameters:
            return
        places = {key: place for place, key in enumerate(self._last_ready)}
        order = torch.tensor(
            [places.get(id(parameter), len(places)) for parameter in self._parameters],
            device=self._parameters[0].device,
        )
        dist.broadcast(order, dist.get_global_rank(self._group, 0), group=self._group)
        found = dict(zip(map(id, self._parameters), order.tolist(), strict=True))
        # Those that got no gradient keep their order and come last.
        self.order = _last(self._withheld, sorted(self.order, key=lambda parameter: found[id(parameter)]))

    def _add(self, parameter: Parameter) -> None:
        if parameter.grad is None:  # it was summed in this pass already, as the gradient of a repeated forward pass
            return
        if self._bucket and self._elements + parameter.numel() > self._max_elements:
            self._launch()
        self._bucket[id(parameter)] = parameter
        self._elements += parameter.numel()
        if self._elements >= self._max_elements:
            self._launch()

    @torch.no_grad()
    def _launch(self) -> None:
        """Start the sum of the gradients in the bucket."""
        if not self._bucket:
            return
        parameters = list(self._bucket.values())
        sizes = [-(-parameter.numel() // self._ranks) for parameter in parameters]
        whole = all(size * self._ranks == each.numel() for size, each in zip(sizes, parameters, strict=True))
        first = parameters[0].grad
        assert first is not None
        sent = (torch.empty if whole else torch.zeros)(
            self._ranks, sum(sizes), dtype=first.dtype, device=first.device, requires_grad=False
        )
        for parameter, part in zip(parameters, sent.split(sizes, dim=1), strict=True):
            gradient = parameter.grad
            assert gradient is not None
            padding = part.numel() - gradient.numel()
            flat = gradient.detach().flatten()
            part.copy_((torch.nn.functional.pad(flat, (0, padding)) if padding else flat).view_as(part))
            parameter.grad = None
        sent.div_(self._ranks)
        sent = sent.view(-1).to(self._dtype or sent.dtype)
        received = sent.new_empty(sum(sizes))
        work = dist.reduce_scatter_tensor(received, sent, group=self._group, async_op=True)
        self._launched.append(_Launched(parameters, sizes, sent, received, work))
        self._bucket, self._elements = {}, 0

    def _reset(self) -> None:
        self._ready, self._passes, self._bucket = {}, {}, {}
        self._next = self._elements = 0


def _last(withheld: Collection[int], parameters: list[Parameter]) -> list[Parameter]:
    """``parameters``, those with an ``id`` in ``withheld`` last."""
    return sorted(parameters, key=lambda parameter: id(parameter) in withheld)
