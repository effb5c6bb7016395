"""Learning-rate schedules that step as often as the optimizer, not as often as the training loop calls them."""

from __future__ import annotations

import gc
from typing import Any

from colossalai.interface import OptimizerWrapper
from torch.optim.lr_scheduler import LRScheduler

from ...profiling.preserved_state import inner_optimizer
from .progress import LoopProgress

__all__ = ["schedules_of", "step_with_optimizer"]


def schedules_of(optimizer: OptimizerWrapper) -> list[LRScheduler]:
    """All schedules of torch's type for this optimizer, also those that were not passed to ``booster.boost``.

    An optimizer does not know its schedules, so they are looked for among all objects, which takes tenths of a second.
    """
    inner = inner_optimizer(optimizer)
    # The type is asked, because `isinstance` runs code of objects that pretend to be others.
    return [each for each in gc.get_objects() if issubclass(type(each), LRScheduler) and _is_of(each, inner)]


def step_with_optimizer(schedule: LRScheduler, progress: LoopProgress) -> None:
    """Let ``schedule.step()`` do nothing while a global batch is incomplete. A second call has no effect.

    The class of the schedule is replaced rather than its method, because its attributes are saved in checkpoints.
    """
    kind = type(schedule)
    if getattr(kind, "steps_with_optimizer", False):
        return

    class SteppedWithOptimizer(kind):  # type: ignore[misc, valid-type]
        steps_with_optimizer = True

        def step(self, *args: Any, **kwargs: Any) -> None:
            if not progress.is_within_global_batch:
                super().step(*args, **kwargs)

    SteppedWithOptimizer.__name__ = kind.__name__
    schedule.__class__ = SteppedWithOptimizer


def _is_of(schedule: LRScheduler, inner: Any) -> bool:
    optimizer = getattr(schedule, "optimizer", None)
    return optimizer is not None and inner_optimizer(optimizer) is inner
