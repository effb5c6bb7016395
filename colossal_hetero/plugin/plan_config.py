"""The user's options for planned runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common.methods import with_checked_names
from ..planner.cluster.group_networks import Adapter
from ..planner.cluster.topology import Topology
from ..planner.cost.pass_order import Schedule
from ..planner.profile.layer_profile import ModelProfile


@with_checked_names
@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Options of planned runs: input of ``plan="auto"``, the networks to use, and when slow stages are reported."""

    cluster: str | Path | Topology | None = None
    """Cluster file (``colossal-hetero probe`` writes one) or its content. Required for ``plan="auto"``. If it is given,
    each group of ranks communicates over the network that its members share."""
    adapters: Mapping[str, Adapter] | None = None
    """Names of this rank's network adapters, by kind in the cluster file. None: as the environment variables say."""
    profile: str | Path | ModelProfile | None = None
    """Profile file of the model (``colossal-hetero profile`` writes one) or its content. Required for ``plan="auto"``.
    With any plan and a cluster, better plans are computed from it if stages take other times than planned."""
    global_batch_size: int | None = None
    """Samples per optimizer step, over all replicas. Required for ``plan="auto"``."""
    micro_batch_sizes: Sequence[int] | None = None
    """Micro-batch sizes to try, in samples; None for all sizes in the profile."""
    method: str = "exact"
    """Method of dividing layers into stages; a name in ``colossal_hetero.planner.stages.split_methods.METHODS``."""
    schedules: Sequence[Schedule] = ("1f1b",)
    """Schedules of pipelines to try: ``1f1b``, ``interleaved``, ``zbv`` (Colossal-AI's ``pp_style``)."""
    model_chunks: Sequence[int] = (2,)
    """Numbers of chunks per stage to try with the schedule ``interleaved``."""
    unequal: bool = True
    """True if the replicas of ``plan="auto"`` may have different stages and batches. Some arguments need equal ones
    (``pp_size``, ``batches``), and so does a loop that calls the model itself and not ``execute_pipeline``."""
    layer_sums: bool = False
    """True if gradients are summed layer by layer, over the ranks that hold a layer, also if all replicas are alike."""
    min_replicas: int = 1
    """Replicas that ``plan="auto"`` should have if memory allows it, even in a slower plan. With two, every layer is
    held twice, so that elastic training goes on when a process is lost."""
    recompute: bool = True
    """True if stages that do not fit otherwise may run their forward passes again in the backward passes."""
    zero_stages: Sequence[int] = (0, 1)
    """ZeRO stages to try, where they gain 1 %; ``zero_stage`` of the plugin then follows from the plan. Only 0 if
    ``zero_stage`` is given to the plugin. Elastic training plans in stage 0, or in both if ``zero_stage=1`` is
    given to the plugin, without recomputation."""
    follow_speed: bool | None = None
    """True if layers move to other ranks while training, when stages take other times than planned and another plan is
    faster; False if stages are only reported. None: True for ``plan="auto"``, where it is possible."""
    drift_threshold: float = 0.2
    """Relative difference from the planned time per micro-batch beyond which a stage is reported at the end of an
    epoch, if layers do not move. With ``inf``, or in a schedule other than 1F1B, stages are not even timed."""

    def __post_init__(self) -> None:
        for name, kinds in (("cluster", (str, Path, Topology)), ("profile", (str, Path, ModelProfile))):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise TypeError(f"{name}={value!r} is neither a file's path nor a {kinds[-1].__name__}")
        if self.global_batch_size is not None:
            _check_samples("global_batch_size", self.global_batch_size)
        _check_samples("min_replicas", self.min_replicas, "replicas")
        if isinstance(self.zero_stages, int) or not self.zero_stages or set(self.zero_stages) - {0, 1}:
            raise ValueError(f"zero_stages={self.zero_stages!r} cannot be planned; use (0,), (1,) or (0, 1)")
        if self.micro_batch_sizes is not None:
            if not self.micro_batch_sizes:
                raise ValueError("micro_batch_sizes is empty; give at least one size, or leave it out to try all")
            for size in self.micro_batch_sizes:
                _check_samples("micro_batch_sizes", size)
        if self.follow_speed not in (True, False, None):
            raise ValueError(f"follow_speed={self.follow_speed!r} must be True, False or None")
        if isinstance(self.drift_threshold, bool) or not self.drift_threshold > 0 or math.isnan(self.drift_threshold):
            raise ValueError(
                f"drift_threshold={self.drift_threshold!r} must be a positive share, such as 0.2 for 20 %; "
                "inf reports nothing"
            )


def _check_samples(name: str, value: object, what: str = "samples") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of {what}, at least 1")
