"""Sums gradients in buckets over the ranks that hold their parameters, while backward passes still compute others
(Holmes, Yang et al. 2023, overlapped optimizer; AutoHet, section III-C, layer-wise gradient synchronization).

[Note: one order of sums] Ranks may get gradients in different orders. So all ranks start sums in one order, and a
bucket waits for those before it: no rank waits for a sum that another rank starts later than one that waits for it.

[Note: unused parameters] A rank does not know which parameters the others use. So every parameter takes part in every
sum, with zeros where a rank has no gradient; which of them a rank has used is in :attr:`GradientSums.used`. Ranks
exchange this before the step. A parameter that no rank has used keeps no gradient, as in one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar
from weakref import proxy

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ...common.ranks import slices_held

T = TypeVar("T")

Finish = Callable[[], object]  # waits until a sum is complete, and puts it where it belongs

RUNNING = 2  # sums over one group that run at once, enough to keep the network busy


@dataclass(frozen=True)
class GradientBucket:
    """Parameters whose gradients are summed in one message, over the ranks of a group."""

    group: dist.ProcessGroup
    parameters: tuple[Parameter, ...]

    @property
    def is_shared(self) -> bool:
        return dist.get_world_size(self.group) > 1


def divided(
    items: Iterable[T], kind: Callable[[T], Hashable], elements: Callable[[T], int], max_elements: int
) -> list[list[T]]:
    """Consecutive ``items`` of one kind, of at most ``max_elements`` together unless there is only one."""
    parts: list[list[T]] = []
    total = 0
    for each in items:
        if not parts or kind(parts[-1][0]) != kind(each) or total + elements(each) > max_elements:
            parts.append([])
            total = 0
        parts[-1].append(each)
        total += elements(each)
    return parts


class GradientSums:
    """Starts the sums of this rank's buckets in their order; see [Note: one order of sums].

    Within :meth:`passes`, gradients accumulate on this rank only; :meth:`finish` ends it. A sum starts as soon as their
    last backward passes have added to all gradients of its bucket and of the buckets before it, as often as the passes
    before have. What is left, such as parameters that not all passes use, starts in :meth:`finish`.

    Only gradients of ``watched`` parameters are summed before :meth:`finish`. If all buckets are of ``one_group``, a
    rank may wait for sums in a backward pass, so that whole gradients are released early, and what came after its sum
    (:attr:`late`) can be summed again.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        start: Callable[[GradientBucket], Finish],
        watched: Iterable[Parameter] = (),
        one_group: bool = False,
    ) -> None:
        self.used: set[int] = set()  # ``id`` of parameters with a gradient of this rank in a sum, since :meth:`drop`
        self.late: set[int] = set()
        self.accumulating = False  # a block of :meth:`passes` runs
        self._start, self._one_group = start, one_group
        self._passes: Callable[[], int] | None = None
        self._runs = False
        self.passes_of: dict[int, int] = {}
        """In how many passes of the latest block a parameter got a gradient, by ``id``; those that got one last come
        last."""
        self._counts: dict[int, int] = {}  # how often the running pass has added to a gradient
        self._expected: dict[int, int] = {}  # the most of the passes before it
        self._totals: dict[int, Tensor] = {}
        self._summed: list[Parameter] = []  # whose gradients are sums
        self._running: deque[Finish] = deque()
        self.arrange(buckets)
        this = proxy(self)
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(lambda each: this.gradient_ready(each))
            for parameter in watched
        ]

    def arrange(self, buckets: Sequence[GradientBucket]) -> None:
        """Use these buckets from now on, in this order. No sum runs meanwhile."""
        self.buckets = tuple(buckets)
        self._bucket_of = {id(each): number for number, bucket in enumerate(buckets) for each in bucket.parameters}
        self._reset()

    @contextmanager
    def passes(self, number: Callable[[], int] | None) -> Iterator[None]:
        """A block in which each parameter has ``number()`` backward passes, one for each micro-batch; then comes
        :meth:`finish`, which adds the sums from before. None: gradients accumulate, and are summed later."""
        for parameter in self._summed:
            if parameter.grad is not None:
                self._totals[id(parameter)], parameter.grad = parameter.grad, None
        self._summed, self.passes_of = [], {}
        self._passes, self.accumulating = number, True
        try:
            yield
        finally:
            self._passes, self.accumulating = None, False

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """A block with one backward pass. Gradients that other passes compute are not summed early."""
        self._learn()
        self._runs = True
        try:
            yield
        finally:
            self._runs = False

    def gradient_ready(self, parameter: Parameter) -> None:
        """Note that a backward pass has added to ``parameter.grad``."""
        key = id(parameter)
        if not self._runs:
            return
        if self._bucket_of[key] < self.started:
            if not self._one_group:
                raise RuntimeError(
                    "a parameter got a gradient after the sum over replicas had been started, because a module was "
                    "used in more reentrant checkpoints (use_reentrant=True) or backward passes inside the model than "
                    "in the micro-batches before; give the plugin overlap_communication=False"
                )
            self.late.add(key)
        # In interleaved schedules, other parameters have passes of their own.
        self.passes_of[key] = self.passes_of.pop(key, 0) + (key not in self._counts)
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._passes is None or self.passes_of[key] < self._passes():
            return
        if self._counts[key] != self._expected.get(key, 1 if self._one_group else None):
            return
        self._missing[self._bucket_of[key]] -= 1
        while self.started < len(self.buckets) and self._missing[self.started] == 0:
            self._start_next()

    def finish(self) -> None:
        """Start what is left, and wait until all sums are complete."""
        while self.started < len(self.buckets):
            self._start_next()
        self._end()
        self._summed = []
        for bucket in self.buckets:
            for parameter in bucket.parameters if bucket.is_shared else ():
                total = self._totals.pop(id(parameter), None)
                if total is not None:
                    parameter.grad = total if parameter.grad is None else total + parameter.grad
                if parameter.grad is not None and id(parameter) not in self.late:
                    self._summed.append(parameter)

    def drop(self) -> None:
        """Forget gradients and sums from before. Sums that have been started end on all ranks."""
        self._end()
        self._totals, self._summed = {}, []
        self.used.clear()
        self.late.clear()

    def _learn(self) -> None:
        for key, count in self._counts.items():
            self._expected[key] = max(count, self._expected.get(key, 0))
        self._counts = {}

    def _start_next(self) -> None:
        bucket = self.buckets[self.started]
        self.started += 1
        self.used.update(id(parameter) for parameter in bucket.parameters if parameter.grad is not None)
        self.late.difference_update(map(id, bucket.parameters))
        self._running.append(self._start(bucket))
        while self._one_group and len(self._running) > RUNNING:
            self._running.popleft()()

    def _end(self) -> None:
        self._reset()
        while self._running:
            self._running.popleft()()

    def _reset(self) -> None:
        self._learn()
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self.started = 0


def all_reduce_gradients(bucket: GradientBucket) -> Finish:
    """Start the sum of whole gradients, which every rank then has in ``parameter.grad``."""
    if not bucket.is_shared:
        return lambda: None
    gradients = (torch.zeros_like(each) if each.grad is None else each.grad.detach() for each in bucket.parameters)
    flat = torch.cat([each.flatten() for each in gradients])
    parts = flat.split([parameter.numel() for parameter in bucket.parameters])
    for parameter, part in zip(bucket.parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    work = dist.all_reduce(flat, group=bucket.group, async_op=True)
    return work.wait


@torch.no_grad()
def scatter_gradients(
    bucket: GradientBucket,
    deliver: Callable[[Parameter, Tensor], None],
    dtype: torch.dtype | None,
    divide: bool = False,
    copies: int = 1,
) -> Finish:
    """Start the sum of gradients, of which each of R ranks keeps a shard, as ZeRO's optimizer uses them: a gradient of
    n elements is padded with zeros to a multiple of R, and the shard of rank r begins at ``r · ⌈n/R⌉``. ``deliver`` is
    called with a parameter and this rank's shards, ``[⌈n/R⌉]`` each, in the gradient's type; ``dtype`` is that of
    messages. With ``divide`` it is the mean over ranks. ``copies`` ranks get each shard, with the same bits
    (:func:`.slices_held`)."""
    ranks = dist.get_world_size(bucket.group)
    held = slices_held(dist.get_rank(bucket.group), ranks, copies)
    sizes = [-(-parameter.numel() // ranks) for parameter in bucket.parameters]
    first = bucket.parameters[0]
    rows = torch.empty(ranks, sum(sizes), dtype=first.dtype, device=first.device)
    for parameter, part in zip(bucket.parameters, rows.split(sizes, dim=1), strict=True):
        if parameter.grad is None:
            part.zero_()
            continue
        flat = parameter.grad.detach().flatten()
        padding = part.numel() - flat.numel()
        part.copy_((torch.nn.functional.pad(flat, (0, padding)) if padding else flat).view_as(part))
        parameter.grad = None
    if divide:
        rows.div_(ranks)
    sent = rows.view(-1).to(dtype or rows.dtype)
    received, work = sent, None
    if len(held) > 1:
        work = dist.all_reduce(sent, group=bucket.group, async_op=True)
    elif bucket.is_shared:
        received = sent.new_empty(sum(sizes))
        work = dist.reduce_scatter_tensor(received, sent, group=bucket.group, async_op=True)

    def finish() -> None:
        if work is not None:
            work.wait()
        assert sent.numel() >= received.numel()  # `sent` is not released before the sum is complete
        shards = received.view(ranks, -1)[list(held)] if len(held) > 1 else received.view(1, -1)
        for parameter, own in zip(bucket.parameters, shards.split(sizes, dim=1), strict=True):
            deliver(parameter, own.flatten().to(parameter.dtype))

    return finish
