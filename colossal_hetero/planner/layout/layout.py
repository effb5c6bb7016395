"""Which device takes which place in a 3D-parallel layout, so that each kind of traffic has the network it needs.

Holmes (section 3): tensor parallelism stays inside a node; devices are numbered cluster by cluster, stage-major, so
that each data-parallel group lies inside one cluster and sums its gradients over that cluster's RDMA network; only
pipelines cross clusters, over Ethernet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..cluster.all_reduce import ring_hops
from ..cluster.topology import Topology

__all__ = ["Layout", "Violation", "naive_layout"]


@dataclass(frozen=True)
class Violation:
    """Where a layout departs from Holmes' definition."""

    rule: Literal["tensor", "data", "network"]
    """A tensor-parallel group leaves its node; a data-parallel group leaves its cluster; one inside a cluster leaves
    its nodes' fastest kind of NIC."""
    group: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Layout:
    """A device for each place: ``ranks[replica][stage][place in the tensor-parallel group]``.

    Raises:
        ValueError: no place at all, stages or groups of different sizes, or a device in two places.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    def __post_init__(self) -> None:
        shapes = {(len(replica), len(group)) for replica in self.ranks for group in replica}
        if len(shapes) != 1 or (0 in next(iter(shapes))) or len({len(replica) for replica in self.ranks}) != 1:
            raise ValueError(
                f"replicas have (stages, tensor-parallel degree) {sorted(shapes)}; give all of them one shape"
            )
        twice = [device for device, count in Counter(self.devices).items() if count > 1]
        if twice:
            raise ValueError(f"device {twice[0]} has more than one place")

    @property
    def data_parallel(self) -> int:
        """Replicas."""
        return len(self.ranks)

    @property
    def pipeline(self) -> int:
        """Stages."""
        return len(self.ranks[0])

    @property
    def tensor_parallel(self) -> int:
        """Devices of a stage of one replica."""
        return len(self.ranks[0][0])

    @property
    def devices(self) -> tuple[int, ...]:
        """All in use, by replica, stage and place."""
        return tuple(device for replica in self.ranks for group in replica for device in group)

    @property
    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """By replica, then stage."""
        return tuple(group for replica in self.ranks for group in replica)

    def stage_groups(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """The data-parallel groups of a stage, by place in the tensor-parallel group."""
        return tuple(zip(*(replica[stage] for replica in self.ranks), strict=True))

    @property
    def data_groups(self) -> tuple[tuple[int, ...], ...]:
        """Which sum their gradients: by stage, then place in the tensor-parallel group."""
        return tuple(group for stage in range(self.pipeline) for group in self.stage_groups(stage))

    @property
    def pipeline_groups(self) -> tuple[tuple[int, ...], ...]:
        """By replica, then place in the tensor-parallel group; each from first to last stage."""
        return tuple(group for replica in self.ranks for group in zip(*replica, strict=True))

    def verify(self, topology: Topology) -> tuple[Violation, ...]:
        """Where this departs from Holmes' definition; nothing if it holds."""
        found = [
            Violation("tensor", group, f"tensor-parallel group {_list(group)} spans nodes {_nodes(topology, group)}")
            for group in self.tensor_groups
            if len({topology.devices[device].node for device in group}) > 1
        ]
        for stage in range(self.pipeline):
            for group in self.stage_groups(stage):
                name = f"data-parallel group {_list(group)} of stage {stage}"
                here = Counter(topology.clusters[topology.devices[device].cluster] for device in group)
                if len(here) > 1:
                    parts = ", ".join(f"{count} in {cluster}" for cluster, count in here.items())
                    pace = _slowest_kind(topology, group)
                    found.append(Violation("data", group, f"{name} spans clusters ({parts}) and runs over {pace}"))
                    continue
                for a, b in ring_hops(topology, group):
                    kind = topology.node_channel(a, b).kind
                    better = {topology.nodes[n].nics[0].kind for n in (a, b) if topology.nodes[n].nics} - {kind}
                    if better:
                        text = f"{name} runs over {kind} between {topology.nodes[a].name} and {topology.nodes[b].name}"
                        text += f", though they have {' and '.join(sorted(better))}"
                        found.append(Violation("network", group, text))
                        break
        return tuple(found)


def naive_layout(
    topology: Topology, tensor_parallel: int, pipeline: int, data_parallel: int, dp_outside: bool = True
) -> Layout:
    """Devices in the order in which they were launched: Colossal-AI's (dp, pp, tp), or (pp, dp, tp) as with its
    ``dp_outside=False``; consecutive ranks are tensor-parallel.

    Raises:
        ValueError: a degree below 1, or more places than devices.
    """
    check_degrees(topology, tensor_parallel, pipeline, data_parallel)

    def first(replica: int, stage: int) -> int:
        place = replica * pipeline + stage if dp_outside else stage * data_parallel + replica
        return place * tensor_parallel

    return Layout(
        tuple(
            tuple(tuple(range(first(d, p), first(d, p) + tensor_parallel)) for p in range(pipeline))
            for d in range(data_parallel)
        )
    )


def check_degrees(topology: Topology, tensor_parallel: int, pipeline: int, data_parallel: int) -> None:
    degrees = {"tensor_parallel": tensor_parallel, "pipeline": pipeline, "data_parallel": data_parallel}
    for name, degree in degrees.items():
        if degree < 1:
            raise ValueError(f"{name}={degree} must be at least 1")
    places = tensor_parallel * pipeline * data_parallel
    if places > len(topology.devices):
        product = " × ".join(f"{name}={degree}" for name, degree in degrees.items())
        raise ValueError(f"{product} takes {places} devices, and there are {len(topology.devices)}")


def _slowest_kind(topology: Topology, group: Sequence[int]) -> str:
    channels = [topology.node_channel(*hop) for hop in ring_hops(topology, group)]
    slowest = min(channels, key=lambda channel: channel.bytes_per_second)
    return f"{slowest.kind} ({slowest.bytes_per_second * 8 / 1e9:g} Gbit/s)"


def _nodes(topology: Topology, group: Sequence[int]) -> str:
    return ", ".join(topology.nodes[node].name for node in sorted({topology.devices[device].node for device in group}))


def _list(group: Sequence[int]) -> str:
    shown = ", ".join(map(str, group[:8]))
    return f"({shown}{', …' if len(group) > 8 else ''})"
