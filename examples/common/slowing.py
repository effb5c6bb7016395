"""Make this rank's training slower, so that whatever measures or trains finds a slow device.

The slowing acts in the model's forward and backward passes, or on the whole process; nothing else knows of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from usage import UsageError

from colossal_hetero.accelerator import get_accelerator
from colossal_hetero.testing.cpu_quota import cpu_quota

__all__ = ["hold_to_quota", "repeat_passes", "slowed"]

PERIOD_US = 20_000
"""Of the quota: shorter than the passes that are timed, so that each of them meets it."""


class _BackwardToo(torch.autograd.Function):
    """Passes a tensor through; in the backward pass does something else before."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, action: Any) -> Tensor:
        ctx.action = action
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.action(gradient)
        return gradient, None


def repeat_passes(model: nn.Module, times: int) -> None:
    """From now on let every forward and backward pass of ``model`` in training be done ``times`` times.

    The passes that are added go through a twin that is no part of the model: gradients, hooks and memory that stages
    of ZeRO shard are those of the model alone. While a pass runs, it takes the memory of one more.

    Args:
        model: not boosted yet; takes one tensor and returns one. Without dropout, whose random state would advance.
        times: 1 changes nothing.
    """
    if times == 1:
        return
    twin = copy.deepcopy(model)

    def run_again(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        if not (module.training and torch.is_grad_enabled()):
            return None
        images = inputs[0].detach()
        twin.to(images)  # the device and the precision that a plugin has chosen
        parameters = list(twin.parameters())
        for _ in range(times - 2):
            twin(images)
        again = twin(images)

        def backward_again(gradient: Tensor) -> None:
            for left in reversed(range(times - 1)):
                torch.autograd.grad(again, parameters, gradient.to(again.dtype), retain_graph=left > 0)

        return _BackwardToo.apply(output, backward_again)

    model.register_forward_hook(run_again)


@contextmanager
def hold_to_quota(slowdown: int) -> Iterator[str | None]:
    """Hold this process to ``1 / slowdown`` of a core as long as the block lasts, if 2 or more.

    Gives None if every rank that is to be slow could be, else why one could not; then none is. Every rank calls it.
    """
    with ExitStack() as stack:
        failure = None
        if slowdown > 1:
            try:
                stack.enter_context(cpu_quota(1 / slowdown, PERIOD_US))
            except OSError as error:
                failure = error.strerror or str(error)
        failures: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        reason = next((each for each in failures if each is not None), None)
        if reason is not None:
            stack.close()
        yield reason


@contextmanager
def slowed(slow_by: str, slow: dict[int, int]) -> Iterator[str]:
    """Slows this rank's process where that is the means; gives the means: ``quota`` or ``repeat``. Every rank calls it.

    Args:
        slow_by: the flag ``--slow-by``.
        slow: how many times as long each rank's work is to take.

    Raises:
        UsageError: a quota was asked for and cannot be had.
    """
    if not slow or slow_by == "repeat":
        yield "repeat"
        return
    if get_accelerator().name != "cpu":
        # A process that launches kernels late is another thing than a slow device.
        if slow_by == "quota":
            raise UsageError("--slow-by quota slows training on a CPU only; use --slow-by repeat")
        yield "repeat"
        return
    with hold_to_quota(slow.get(dist.get_rank(), 1)) as failure:
        if failure is not None and slow_by == "quota":
            raise UsageError(f"--slow-by quota is not possible here ({failure}); use --slow-by repeat")
        yield "repeat" if failure is not None else "quota"
