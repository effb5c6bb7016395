"""The time of global batches from forward passes only, for devices on which waiting in the backward pass is not seen.

On a GPU, FSDP (stage 3) gathers and sums on streams of its own, and the device waits for them at places in the backward
pass that no hook marks. In the forward pass it waits before each module. If a device changes its speed, forward and
backward passes change alike, so the profile says what the whole global batch takes.
"""

from __future__ import annotations

from scipy.optimize import isotonic_regression
from torch import nn

from ..planner.batches.batch_profile import DeviceProfile
from ..planner.batches.time_curve import Curve
from ..profiling.batches.forward_timer import ForwardTimer
from .busy_timer import TimedGlobalBatch
from .loader import HeteroDataLoader

__all__ = ["ForwardOnlyTimer", "forward_curve"]


class ForwardOnlyTimer:
    """Times forward passes, and says what the micro-batches take by them. A micro-batch counts as a global batch.

    Args:
        model: the model, wrapped by the plugin of its stage.
        loader: the loader of its micro-batches.
        whole: seconds of forward and backward pass by samples, as measured for the profile.
        forward: seconds of the forward pass.
    """

    def __init__(self, model: nn.Module, loader: HeteroDataLoader, whole: Curve, forward: Curve) -> None:
        self._whole, self._forward = whole, forward
        self._timer = ForwardTimer(model, lambda: 1 if loader.current is None else max(1, loader.current.samples))

    def take(self) -> list[TimedGlobalBatch]:
        """The micro-batches since the last call."""
        return [
            TimedGlobalBatch((samples,), seconds * self._ratio(samples), 0.0, 0.0, 0.0)
            for samples, seconds in self._timer.take()
        ]

    def _ratio(self, samples: int) -> float:
        return float(self._whole.seconds[samples] / self._forward.seconds[samples])


def forward_curve(device: DeviceProfile, max_batch: int) -> Curve | None:
    """Seconds of a forward pass by its samples; None if the profile has too few forward times to compare speeds."""
    points = {point.batch: point.forward_seconds for point in device.points if point.forward_seconds is not None}
    if len(points) < min(2, max_batch):
        return None
    # The times of short passes are noisy; make them non-decreasing.
    seconds = isotonic_regression([points[batch] for batch in sorted(points)]).x
    return Curve.through(dict(zip(sorted(points), seconds, strict=True)), max(max_batch, *points)).limited(max_batch)
