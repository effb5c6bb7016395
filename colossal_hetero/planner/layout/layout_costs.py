"""What a layout costs in communication, over the networks that its groups share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..cluster.all_reduce import carried, concurrent_seconds
from ..cluster.topology import Topology
from .layout import Layout

__all__ = ["LayoutCosts", "layout_costs"]


@dataclass(frozen=True)
class LayoutCosts:
    """What a layout costs in communication, per iteration."""

    synchronization_seconds: tuple[float, ...]
    """By stage: its slowest data-parallel group, while those of all stages run. See synchronization.py, Note: shared
    NICs."""
    hop_seconds: tuple[float, ...]
    """By cut: one micro-batch one way, the slowest replica, while all replicas send."""
    micro_batches: int

    @property
    def gradients_seconds(self) -> float:
        """Until the slowest stage has synchronized."""
        return max(self.synchronization_seconds)

    @property
    def pipeline_seconds(self) -> float:
        """What hops add to an iteration if all stages are equally busy, counted as in ``planner.stages.pipeline``."""
        ends = [0.0, *self.hop_seconds, 0.0]
        longest = max(before + after for before, after in pairwise(ends))
        return 2 * sum(self.hop_seconds) + (self.micro_batches - 1) * longest

    @property
    def seconds(self) -> float:
        """Both."""
        return self.gradients_seconds + self.pipeline_seconds


def layout_costs(
    topology: Topology,
    layout: Layout,
    gradient_bytes_per_stage: float | Sequence[float],
    activation_bytes: float,
    micro_batches: int,
) -> LayoutCosts:
    """What ``layout`` costs in communication between nodes and devices, but for tensor parallelism.

    Args:
        gradient_bytes_per_stage: per device, of each stage or of all.
        activation_bytes: that a device sends on per micro-batch.
        micro_batches: per iteration and replica.

    Raises:
        ValueError: not one number per stage, a negative one, or devices that cannot reach each other.
    """
    stages = range(layout.pipeline)
    if isinstance(gradient_bytes_per_stage, Sequence):
        if len(gradient_bytes_per_stage) != layout.pipeline:
            raise ValueError(f"{len(gradient_bytes_per_stage)} numbers of bytes for {layout.pipeline} stages")
        gradients = list(gradient_bytes_per_stage)
    else:
        gradients = [gradient_bytes_per_stage for _ in stages]
    if activation_bytes < 0 or micro_batches < 1:
        raise ValueError(f"activation_bytes={activation_bytes} must be at least 0, micro_batches={micro_batches} 1")
    seconds = concurrent_seconds(
        topology, layout.data_groups, [each for each in gradients for _ in range(layout.tensor_parallel)]
    )
    width = layout.tensor_parallel
    return LayoutCosts(
        synchronization_seconds=tuple(max(seconds[s * width : (s + 1) * width]) for s in stages),
        hop_seconds=tuple(_hop_seconds(topology, layout, stage, activation_bytes) for stage in stages[:-1]),
        micro_batches=micro_batches,
    )


def _hop_seconds(topology: Topology, layout: Layout, stage: int, activation_bytes: float) -> float:
    """All replicas send at once and share NICs as rings do."""
    pairs = [
        (topology.devices[a].node, topology.devices[b].node)
        for replica in layout.ranks
        for a, b in zip(replica[stage], replica[stage + 1], strict=True)
    ]
    load = Counter(
        (node, way, topology.node_channel(a, b).kind) for a, b in pairs if a != b for way, node in enumerate((a, b))
    )
    slowest = 0.0
    for a, b in set(pairs):
        channel = topology.node_channel(a, b)
        speeds = [channel.bandwidth(activation_bytes)]
        if a != b:
            speeds += [
                carried(topology, node, channel, activation_bytes) / load[node, way, channel.kind]
                for way, node in enumerate((a, b))
            ]
        slowest = max(slowest, channel.latency_seconds + activation_bytes / min(speeds) if activation_bytes else 0.0)
    return slowest
