"""The user's options for planned runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..planner.cluster.group_networks import Adapter
from ..planner.cluster.topology import Topology
from ..planner.cost.pass_order import Schedule
from ..planner.cost.tp_groups import DEFAULT, SIMPLE
from ..planner.profile.layer_profile import ModelProfile

__all__ = ["SPACES", "PlanConfig"]

SPACES = {"simple": SIMPLE, "default": DEFAULT}
"""By name, the search spaces whose plans the plugin runs."""


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
    With any plan, new splits are computed from it if stage times differ from the plan."""
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
    search_space: str = "simple"
    """Plans that ``plan="auto"`` may make: ``simple`` (ZeRO stage 0, no recomputation) or ``default`` (also these,
    where they gain 1 %). ``zero_stage`` then follows from the plan. Elastic training has simple plans only."""
    quick: bool = False
    """True for a shorter search by ``plan="auto"``: up to two thirds less time, for iterations up to 2 % longer in 160
    random clusters of 12 to 64 devices. Elastic training always plans so, because the devices wait for the plan."""
    drift_threshold: float = 0.2
    """Relative difference from the planned time per micro-batch beyond which a stage is reported at the end of an
    epoch. With ``inf``, or in a schedule other than 1F1B, stages are neither timed nor reported."""

    def __post_init__(self) -> None:
        for name, kinds in (("cluster", (str, Path, Topology)), ("profile", (str, Path, ModelProfile))):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise TypeError(f"{name}={value!r} is neither a file's path nor a {kinds[-1].__name__}")
        if self.global_batch_size is not None:
            _check_samples("global_batch_size", self.global_batch_size)
        _check_samples("min_replicas", self.min_replicas, "replicas")
        if self.search_space not in SPACES:
            raise ValueError(f"search_space={self.search_space!r}: valid are {', '.join(SPACES)}")
        if self.search_space != "simple" and tuple(self.schedules) != ("1f1b",):
            raise ValueError(
                f"search_space={self.search_space!r} is for the schedule 1f1b only, not for "
                f"{', '.join(self.schedules)}; leave one of them out"
            )
        if self.micro_batch_sizes is not None:
            if not self.micro_batch_sizes:
                raise ValueError("micro_batch_sizes is empty; give at least one size, or leave it out to try all")
            for size in self.micro_batch_sizes:
                _check_samples("micro_batch_sizes", size)
        if isinstance(self.drift_threshold, bool) or not self.drift_threshold > 0 or math.isnan(self.drift_threshold):
            raise ValueError(
                f"drift_threshold={self.drift_threshold!r} must be a positive share, such as 0.2 for 20 %; "
                "inf reports nothing"
            )


def _check_samples(name: str, value: object, what: str = "samples") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of {what}, at least 1")
