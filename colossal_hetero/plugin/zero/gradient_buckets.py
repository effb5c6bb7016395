"""Sums gradients over replicas in buckets during backward passes (Holmes, Yang et al. 2023, overlapped optimizer).

[Note: order of buckets] All ranks of a group must start the same collectives in the same order, although gradients may
get ready in different orders, for example if a micro-batch does not use all parameters. So a gradient enters a bucket
only after those before it in an order that all ranks share: at first that of the parameters, reversed, and from the
optimizer's first step on that in which rank 0 had its gradients. What is not ready follows at the end of the pass.

[Note: unused parameters] A rank does not know which parameters the others use. So every parameter takes part in every
sum, with zeros where a rank has no gradient, and a bucket also sums how many ranks have one. A parameter that no rank
has used keeps no gradient, as in one process. A gradient that comes after its parameter was sent (a repeated forward
pass) stays until the next sum. The last bucket says if there are such gradients; they are summed before a step, and
their parameters are sent last from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter


class _Launched(NamedTuple):
    parameters: list[Parameter]
    shard_sizes: list[int]
    received: Tensor
    """Shards of the mean gradients; then per parameter > 0 if a rank has its gradient, and one for late gradients."""
    work: dist.Work


class GradientBuckets:
    """Sums gradients over the R ranks of a group. Each keeps its shard of every mean gradient (:func:`packed_shards`).

    Args:
        parameters: those with gradients, in an order that is the same on all ranks.
        max_elements: a bucket is started before it would hold more elements, unless it has only one gradient.
        communication_dtype: type in which gradients are sent; None: their own.
        deliver: called with a parameter and this rank's shard ``[⌈n/R⌉]``, in the gradient's type, padded with zeros.
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
        self.order: list[Parameter] = _last(withheld, list(reversed(parameters)))  # in which they enter buckets
        self._parameters = list(parameters)
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._max_elements = max_elements
        self._dtype = communication_dtype
        self._deliver = deliver
        self._withheld = set(withheld)
        self._ready: dict[int, Parameter] = {}
        self._last_ready: list[int] = []
        self._passes: dict[int, int] = {}
        self._next = 0
        self._bucket: dict[int, Parameter] = {}
        self._elements = 0
        self._launched: list[_Launched] = []
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()  # sums that may be running, and what they send
        self._flags: list[tuple[list[Parameter], Tensor]] = []
        self._used: set[int] = set()

    def gradient_ready(self, parameter: Parameter, passes: int = 1) -> None:
        """Note that a backward pass has added to ``parameter.grad``, which is complete after ``passes`` passes."""
        key = id(parameter)
        self._passes[key] = self._passes.get(key, 0) + 1
        if self._passes[key] < passes or key in self._withheld:
            return
        self._ready[key] = parameter
        # The last one waits for the end of the passes; see [Note: unused parameters].
        while self._next < len(self.order) - 1 and id(self.order[self._next]) in self._ready:
            self._next += 1
            self._add(self.order[self._next - 1])

    def finish(self) -> None:
        """Start what is left, wait until all sums are complete, and deliver the gradients."""
        self._sum(self.order[self._next :])

    def complete(self) -> list[Parameter]:
        """Sum late gradients; returns parameters unused on all ranks since :meth:`drop`. Called by all ranks at
        once."""
        flags, self._flags = self._flags, []
        if not flags:
            return []
        found = torch.cat([each for _, each in flags]).tolist()
        comes_late = found[-1] > 0
        places = iter(found)
        for parameters, _ in flags:
            self._used.update(id(each) for each in parameters if next(places) > 0)
            next(places)
        if comes_late:
            has_late = torch.tensor([each.grad is not None for each in self.order], dtype=torch.int32)
            has_late = has_late.to(self.order[0].device)
            dist.all_reduce(has_late, dist.ReduceOp.MAX, group=self._group)
            late = [each for each, flag in zip(self.order, has_late.tolist(), strict=True) if flag]
            self._sum(late)
            self._flags.clear()
            self._withheld.update(map(id, late))
            self.order = _last(self._withheld, self.order)
        return [each for each in self.order if id(each) not in self._used]

    def drop(self) -> None:
        """Forget the gradients that are not delivered yet. What has been started ends on all ranks."""
        launched, self._launched = self._launched, []
        self._flags.clear()
        self._used.clear()
        self._reset()
        for bucket in launched:
            bucket.work.wait()
        self._sending.clear()

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

    def _sum(self, parameters: Sequence[Parameter]) -> None:
        for parameter in parameters:
            self._add(parameter)
        self._launch()
        self._last_ready = list(self._ready) or self._last_ready
        launched, self._launched = self._launched, []
        self._reset()
        for bucket in launched:
            bucket.work.wait()
            if self._sending and self._sending[0][0] is bucket.work:
                self._sending.popleft()
            *shards, flags = bucket.received.split([*bucket.shard_sizes, len(bucket.parameters) + 1])
            # A copy, so that the shards are not kept until the step.
            self._flags.append((bucket.parameters, flags.clone()))
            for parameter, shard in zip(bucket.parameters, shards, strict=True):
                self._deliver(parameter, shard.to(parameter.dtype))

    def _add(self, parameter: Parameter) -> None:
        if self._bucket and self._elements + parameter.numel() > self._max_elements:
            self._launch()
        self._bucket[id(parameter)] = parameter
        self._elements += parameter.numel()
        if self._elements >= self._max_elements:
            self._launch()

    @torch.no_grad()
    def _launch(self) -> None:
        if not self._bucket:
            return
        parameters = list(self._bucket.values())
        missing = [number for number, parameter in enumerate(parameters) if parameter.grad is None]
        sent, sizes = packed_shards(parameters, self._ranks, extra=len(parameters) + 1)
        flags = sent[:, sum(sizes) :]
        # Not copied from the host, which on a GPU would wait for all that was launched.
        flags.fill_(1)
        for number in missing:
            flags[:, number].zero_()
        if parameters[-1] is not self.order[-1] or all(each.grad is None for each in self.order):
            flags[:, -1].zero_()  # none comes late
        sent.div_(self._ranks)
        sent = sent.view(-1).to(self._dtype or sent.dtype)
        received = sent.new_empty(len(sent) // self._ranks)
        work = dist.reduce_scatter_tensor(received, sent, group=self._group, async_op=True)
        self._launched.append(_Launched(parameters, sizes, received, work))
        # Whole gradients stay only until they are summed, and two sums are enough to keep the network busy.
        self._sending.append((work, sent))
        while len(self._sending) > 2:
            done, _ = self._sending.popleft()
            done.wait()
        self._bucket, self._elements = {}, 0

    def _reset(self) -> None:
        self._ready, self._passes, self._bucket = {}, {}, {}
        self._next = self._elements = 0


def packed_shards(parameters: Sequence[Parameter], ranks: int, extra: int = 0) -> tuple[Tensor, list[int]]:
    """Take the gradients of ``parameters`` into a message ``[R, elements + extra]`` to R ranks. Returns it and the
    elements of each shard: a gradient of n elements (zeros if there is none) is padded with zeros to a multiple of R,
    and the shard of rank r are those from ``r · ⌈n/R⌉``. The last ``extra`` columns are not set."""
    sizes = [-(-parameter.numel() // ranks) for parameter in parameters]
    first = parameters[0]
    sent = torch.empty(ranks, sum(sizes) + extra, dtype=first.dtype, device=first.device)
    for parameter, part in zip(parameters, sent[:, : sum(sizes)].split(sizes, dim=1), strict=True):
        if parameter.grad is None:
            part.zero_()
            continue
        flat = parameter.grad.detach().flatten()
        padding = part.numel() - flat.numel()
        part.copy_((torch.nn.functional.pad(flat, (0, padding)) if padding else flat).view_as(part))
        parameter.grad = None
    return sent, sizes


def _last(withheld: Collection[int], parameters: list[Parameter]) -> list[Parameter]:
    return sorted(parameters, key=lambda parameter: id(parameter) in withheld)
