"""Sums of gradients over all ranks that hold a layer, started while backward passes still compute other gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from weakref import proxy

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from ..zero.gradient_buckets import packed_shards

Finish = Callable[[], object]  # waits until a sum is complete, and puts it where it belongs


@dataclass(frozen=True)
class SharedBucket:
    group: dist.ProcessGroup
    parameters: tuple[Parameter, ...]

    @property
    def is_shared(self) -> bool:
        return dist.get_world_size(self.group) > 1


class LayerSums:
    """Starts the sums of this rank's buckets in their order; see [Note: one order of sums] in ``replica_gradients.py``.
    Between :meth:`passes` and :meth:`finish`, gradients accumulate on this rank only; sums from before are added
    afterwards, so that gradients may be summed several times before a step. A sum starts as soon as the last backward
    pass has added to all gradients of its bucket and of the buckets before it, as often as the passes before it have: a
    module in several reentrant checkpoints gets several gradients. What is left, such as parameters without a gradient,
    starts in :meth:`finish`."""

    def __init__(
        self, buckets: Sequence[SharedBucket], start: Callable[[SharedBucket], Finish], early: bool = True
    ) -> None:
        self.buckets = tuple(buckets)
        self.used: set[int] = set()  # ``id`` of parameters with a gradient of this rank in a sum, since :meth:`drop`
        self.accumulating = False  # a block of :meth:`passes` runs
        self._start = start
        self._early = early
        self._bucket_of = {id(each): number for number, bucket in enumerate(buckets) for each in bucket.parameters}
        self._hooks: list[RemovableHandle] = []
        self._passes: Callable[[], int] | None = None
        self._pass = 0
        self._counts: dict[int, int] = {}  # by ``id``: how often the running pass has added to a gradient
        self._expected: dict[int, int] = {}  # the most of the passes before it
        self._totals: dict[int, Tensor] = {}
        self._summed: set[int] = set()
        self._reset()
        this = proxy(self)
        for bucket in buckets:
            for parameter in bucket.parameters:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(_ready, this)))

    @contextmanager
    def passes(self, number: Callable[[], int] | None) -> Iterator[None]:
        """A block in which ``number()`` backward passes run, one for each micro-batch; then comes :meth:`finish`. None:
        gradients accumulate in the block, and are summed later together with others."""
        for parameter in self._parameters():
            if id(parameter) in self._summed and parameter.grad is not None:
                self._totals[id(parameter)], parameter.grad = parameter.grad, None
        self._summed, self._pass = set(), 0
        self._passes, self.accumulating = number, True
        try:
            yield
        finally:
            self._passes, self.accumulating = None, False

    def begin_pass(self) -> None:
        self._learn()
        self._pass += 1

    def gradient_ready(self, parameter: Parameter) -> None:
        """Note that a backward pass has added to ``parameter.grad``."""
        key = id(parameter)
        if self._bucket_of[key] < len(self._started):
            raise RuntimeError(
                "a parameter got a gradient after the sum over replicas had been started, because a module was used "
                "in more reentrant checkpoints (use_reentrant=True) or backward passes inside the model than in the "
                "micro-batches before; give the plugin overlap_communication=False"
            )
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._passes is None or not self._early or self._pass < self._passes():
            return
        if self._counts[key] != self._expected.get(key):
            return
        self._missing[self._bucket_of[key]] -= 1
        while len(self._started) < len(self.buckets) and self._missing[len(self._started)] == 0:
            self._start_next()

    def finish(self) -> None:
        while len(self._started) < len(self.buckets):
            self._start_next()
        self._end()
        for parameter in self._parameters():
            total = self._totals.pop(id(parameter), None)
            if total is not None:
                parameter.grad = total if parameter.grad is None else total + parameter.grad
        self._summed = {id(each) for each in self._parameters() if each.grad is not None}

    def drop(self) -> None:
        """Forget gradients and sums from before. Sums that have been started end on all ranks."""
        self._end()
        self._totals, self._summed = {}, set()
        self.used.clear()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _parameters(self) -> Iterator[Parameter]:
        return (parameter for bucket in self.buckets if bucket.is_shared for parameter in bucket.parameters)

    def _learn(self) -> None:
        for key, count in self._counts.items():
            self._expected[key] = max(count, self._expected.get(key, 0))
        self._counts = {}

    def _end(self) -> None:
        started = self._started
        self._reset()
        for finish in started:
            finish()

    def _start_next(self) -> None:
        bucket = self.buckets[len(self._started)]
        self.used.update(id(parameter) for parameter in bucket.parameters if parameter.grad is not None)
        self._started.append(self._start(bucket))

    def _reset(self) -> None:
        self._learn()
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._started: list[Finish] = []


def _ready(sums: LayerSums, parameter: Parameter) -> None:
    sums.gradient_ready(parameter)


def all_reduce_gradients(bucket: SharedBucket) -> Finish:
    """Start the sum of whole gradients, which every holder then has in ``parameter.grad``. Parameters without a
    gradient on this rank count as zero."""
    if not bucket.is_shared:
        return lambda: None
    gradients = (torch.zeros_like(each) if each.grad is None else each.grad.detach() for each in bucket.parameters)
    flat = torch.cat([each.flatten() for each in gradients])
    parts = flat.split([parameter.numel() for parameter in bucket.parameters])
    for parameter, part in zip(bucket.parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    work = dist.all_reduce(flat, group=bucket.group, async_op=True)
    return work.wait


def scatter_gradients(
    bucket: SharedBucket, deliver: Callable[[Parameter, Tensor], None], dtype: torch.dtype | None
) -> Finish:
    """Start the sum of gradients, of which each of R holders keeps a shard, as ZeRO's optimizer uses them (see
    :func:`.packed_shards`). ``deliver`` is called with a parameter and this rank's shard, ``[⌈n/R⌉]`` in the gradient's
    type; ``dtype`` is that of messages (None: the gradients' own)."""
    sent, sizes = packed_shards(bucket.parameters, dist.get_world_size(bucket.group))
    sent = sent.view(-1).to(dtype or sent.dtype)
    received, work = sent, None
    if bucket.is_shared:
        received = sent.new_empty(sum(sizes))
        work = dist.reduce_scatter_tensor(received, sent, group=bucket.group, async_op=True)

    def finish() -> None:
        if work is not None:
            work.wait()
        assert sent.numel() >= received.numel()  # `sent` is not released before the sum is complete
        for parameter, shard in zip(bucket.parameters, received.split(sizes), strict=True):
            deliver(parameter, shard.to(parameter.dtype))

    return finish
