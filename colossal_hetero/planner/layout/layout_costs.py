"""Communication time of a layout, when its groups share networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..cluster.all_reduce import concurrent_seconds
from ..cluster.shared_hops import hop_channels
from ..cluster.topology import Topology
from .layout import Layout

__all__ = ["LayoutCosts", "layout_costs"]


@dataclass(frozen=True)
class LayoutCosts:
    """Communication time of a layout, per iteration."""

    synchronization_seconds: tuple[float, ...]
    """Seconds of gradient reduction for each stage: its slowest data-parallel group, while the groups of all stages
    communicate. See ``planner/cluster/all_reduce.py``, Note: shared NICs."""
    hop_seconds: tuple[float, ...]
    """Seconds to send one micro-batch in one direction, for each pair of neighboring stages: the slowest replica, while
    all stages send. See ``planner/cluster/shared_hops.py``, Note: shared hops."""
    micro_batches: int
    """Micro-batches per iteration and replica."""

    @property
    def gradients_seconds(self) -> float:
        """Seconds until the slowest stage has reduced its gradients."""
        return max(self.synchronization_seconds)

    @property
    def pipeline_seconds(self) -> float:
        """Seconds that transfers between stages add to an iteration if all stages compute equally long."""
        ends = [0.0, *self.hop_seconds, 0.0]
        longest = max(before + after for before, after in pairwise(ends))
        return 2 * sum(self.hop_seconds) + (self.micro_batches - 1) * longest

    @property
    def seconds(self) -> float:
        """Sum of ``gradients_seconds`` and ``pipeline_seconds``."""
        return self.gradients_seconds + self.pipeline_seconds


def layout_costs(
    topology: Topology,
    layout: Layout,
    gradient_bytes_per_stage: float | Sequence[float],
    activation_bytes: float,
    micro_batches: int,
) -> LayoutCosts:
    """Predict the communication time of ``layout`` without that of tensor parallelism.

    Args:
        topology: Machines.
        layout: The device at each place.
        gradient_bytes_per_stage: Gradients per device; one number per stage, or one for all stages.
        activation_bytes: Bytes that a device sends to the next stage per micro-batch.
        micro_batches: Micro-batches per iteration and replica.

    Raises:
        ValueError: There is not one number per stage, a number is negative, or devices cannot reach each other.
    """
    stages = range(layout.pipeline)
    if isinstance(gradient_bytes_per_stage, Sequence):
        if len(gradient_bytes_per_stage) != layout.pipeline:
            raise ValueError(
                f"gradient_bytes_per_stage has {len(gradient_bytes_per_stage)} values for {layout.pipeline} stages"
            )
        gradients = list(gradient_bytes_per_stage)
    else:
        gradients = [gradient_bytes_per_stage for _ in stages]
    if activation_bytes < 0 or micro_batches < 1:
        raise ValueError(
            f"activation_bytes={activation_bytes} must be at least 0, micro_batches={micro_batches} at least 1"
        )
    seconds = concurrent_seconds(
        topology, layout.data_groups, [each for each in gradients for _ in range(layout.tensor_parallel)]
    )
    width = layout.tensor_parallel
    hops = hop_channels(topology, layout.pipeline_groups)
    return LayoutCosts(
        synchronization_seconds=tuple(max(seconds[s * width : (s + 1) * width]) for s in stages),
        hop_seconds=tuple(max(pipeline[stage].seconds(activation_bytes) for pipeline in hops) for stage in stages[:-1]),
        micro_batches=micro_batches,
    )
