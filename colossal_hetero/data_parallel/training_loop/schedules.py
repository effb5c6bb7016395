"""Learning-rate schedules and averages of weights that count as often as the optimizer steps, not as often as the
training loop calls them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from colossalai.interface import OptimizerWrapper
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ...profiling.preserved_state import inner_optimizer
from .progress import LoopProgress

__all__ = ["averages_of", "schedules_of", "step_with_optimizer", "update_with_optimizer"]


AVERAGES: Any = (AveragedModel, ModelEmaV2, ModelEmaV3)


def schedules_of(optimizer: OptimizerWrapper) -> list[LRScheduler]:
    """All schedules of torch's type for this optimizer, also those that were not passed to ``booster.boost``.

    An optimizer does not know its schedules, so they are looked for among all objects, which takes tenths of a second.
    """
    inner = inner_optimizer(optimizer)
    # The type is asked, because `isinstance` runs code of objects that pretend to be others.
    return [each for each in gc.get_objects() if issubclass(type(each), LRScheduler) and _is_of(each, inner)]


def averages_of(model: nn.Module) -> list[nn.Module]:
    """All averages of weights, of the types of torch and timm, that were made of ``model`` or of a part of it."""
    names = {name.removeprefix("module.") for name, _ in model.named_parameters()}
    return [each for each in gc.get_objects() if issubclass(type(each), AVERAGES) and _averages(each, names)]


def update_with_optimizer(average: nn.Module, progress: LoopProgress) -> None:
    """Let an average of weights not be updated while a global batch is incomplete. A second call has no effect."""
    kind = type(average)
    if getattr(kind, "updates_with_optimizer", False):
        return

    def updating(update: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            if not progress.is_within_global_batch:
                update(self, *args, **kwargs)

        return run

    methods = {name: updating(getattr(kind, name)) for name in ("update", "update_parameters") if hasattr(kind, name)}
    average.__class__ = type(kind.__name__, (kind,), {**methods, "updates_with_optimizer": True})


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


def _averages(average: nn.Module, names: set[str]) -> bool:
    return {name.removeprefix("module.").removeprefix("module.") for name, _ in average.named_parameters()} <= names


def _is_of(schedule: LRScheduler, inner: Any) -> bool:
    optimizer = getattr(schedule, "optimizer", None)
    return optimizer is not None and inner_optimizer(optimizer) is inner
