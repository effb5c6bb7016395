"""Hold the slow ranks' processes to a share of a core, where ``--straggler-means`` and the machine allow it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist

from colossal_hetero.accelerator import get_accelerator
from colossal_hetero.testing.stragglers import cpu_quota

from .options import UsageError

PERIOD_US = 20_000
"""Period of the quota: shorter than the passes that are timed, so that each of them is slowed."""


@contextmanager
def quota_or_repeat(means: str, factors: dict[int, int]) -> Iterator[str]:
    """Slow this rank's process by a quota while the block runs, if that is the means. Every rank calls it.

    Args:
        means: the flag ``--straggler-means``.
        factors: how many times as long each slow rank's work takes, by rank.

    Yields:
        ``quota``; or ``repeat`` where no quota holds, and passes must be repeated instead.

    Raises:
        UsageError: ``means`` is ``quota``, and a quota is not possible.
    """
    if not factors or means == "repeat":
        yield "repeat"
        return
    if get_accelerator().name != "cpu":
        # A process that launches kernels late does not behave like a slow device.
        if means == "quota":
            raise UsageError("--straggler-means quota slows training on a CPU only; use --straggler-means repeat")
        yield "repeat"
        return
    with _hold_to_quota(factors.get(dist.get_rank(), 1)) as failure:
        if failure is not None and means == "quota":
            raise UsageError(f"--straggler-means quota is not possible here ({failure}); use --straggler-means repeat")
        yield "repeat" if failure is not None else "quota"


@contextmanager
def _hold_to_quota(factor: int) -> Iterator[str | None]:
    """Hold this process to ``1 / factor`` of a core while the block runs, if ``factor`` is 2 or more.

    Yields None if every slow rank has its quota. If one of them cannot have it, none has, and the reason is yielded.
    """
    with ExitStack() as stack:
        failure = None
        if factor > 1:
            try:
                stack.enter_context(cpu_quota(1 / factor, PERIOD_US))
            except OSError as error:
                failure = error.strerror or str(error)
        failures: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        reason = next((each for each in failures if each is not None), None)
        if reason is not None:
            stack.close()
        yield reason
