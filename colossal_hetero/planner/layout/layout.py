"""Which device takes which place in a 3D-parallel layout.

Holmes (section 3) gives each kind of traffic the network it needs: tensor parallelism stays inside a node. Devices are
numbered cluster by cluster, stage-major, so that each data-parallel group lies inside one cluster and reduces its
gradients over that cluster's RDMA network. Only pipelines cross clusters, over Ethernet.
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
    """A group of a layout that does not meet Holmes' definition."""

    rule: Literal["tensor", "data", "network"]
    """"tensor": a tensor-parallel group spans several nodes. "data": a data-parallel group spans several clusters.
    "network": a data-parallel group inside one cluster does not use its nodes' fastest kind of NIC."""
    group: tuple[int, ...]
    """The devices of the group."""
    text: str
    """The violation in words."""


@dataclass(frozen=True)
class Layout:
    """The device at each place of a 3D-parallel layout.

    Raises:
        ValueError: There is no place, replicas or tensor-parallel groups differ in size, or a device has two places.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """Devices, indexed as ``ranks[replica][stage][place in the tensor-parallel group]``."""

    def __post_init__(self) -> None:
        shapes = {(len(replica), len(group)) for replica in self.ranks for group in replica}
        if len(shapes) != 1 or (0 in next(iter(shapes))) or len({len(replica) for replica in self.ranks}) != 1:
            raise ValueError(
                f"replicas have (stages, tensor-parallel degree) {sorted(shapes)}; all of them need one shape"
            )
        duplicates = [device for device, count in Counter(self.devices).items() if count > 1]
        if duplicates:
            raise ValueError(f"device {duplicates[0]} has more than one place")

    @property
    def data_parallel(self) -> int:
        """Number of replicas."""
        return len(self.ranks)

    @property
    def pipeline(self) -> int:
        """Number of stages."""
        return len(self.ranks[0])

    @property
    def tensor_parallel(self) -> int:
        """Number of devices in a tensor-parallel group, which is one stage of one replica."""
        return len(self.ranks[0][0])

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices in use, ordered by replica, stage and place in the tensor-parallel group."""
        return tuple(device for replica in self.ranks for group in replica for device in group)

    @property
    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """The tensor-parallel groups, ordered by replica, then stage."""
        return tuple(group for replica in self.ranks for group in replica)

    def stage_groups(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """The data-parallel groups of ``stage``, ordered by place in the tensor-parallel group."""
        return tuple(zip(*(replica[stage] for replica in self.ranks), strict=True))

    @property
    def data_groups(self) -> tuple[tuple[int, ...], ...]:
        """The data-parallel groups, ordered by stage, then place in the tensor-parallel group."""
        return tuple(group for stage in range(self.pipeline) for group in self.stage_groups(stage))

    @property
    def pipeline_groups(self) -> tuple[tuple[int, ...], ...]:
        """The pipelines, each from first to last stage: ordered by replica, then place in the tensor-parallel group."""
        return tuple(group for replica in self.ranks for group in zip(*replica, strict=True))

    def verify(self, topology: Topology) -> tuple[Violation, ...]:
        """The groups that do not meet Holmes' definition; an empty tuple if all do."""
        found = [
            Violation("tensor", group, f"tensor-parallel group {_list(group)} spans nodes {_nodes(topology, group)}")
            for group in self.tensor_groups
            if len({topology.devices[device].node for device in group}) > 1
        ]
        for stage in range(self.pipeline):
            for group in self.stage_groups(stage):
                name = f"data-parallel group {_list(group)} of stage {stage}"
                by_cluster = Counter(topology.clusters[topology.devices[device].cluster] for device in group)
                if len(by_cluster) > 1:
                    parts = ", ".join(f"{count} in {cluster}" for cluster, count in by_cluster.items())
                    slowest = _slowest_kind(topology, group)
                    found.append(Violation("data", group, f"{name} spans clusters ({parts}) and runs over {slowest}"))
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
    """Colossal-AI's layout: devices in the order in which they were launched, consecutive ranks tensor-parallel.

    Args:
        topology: Machines.
        tensor_parallel: Devices in a tensor-parallel group.
        pipeline: Stages.
        data_parallel: Replicas.
        dp_outside: As in Colossal-AI's plugin: True numbers the mesh (dp, pp, tp), False (pp, dp, tp).

    Raises:
        ValueError: A degree is below 1, or there are more places than devices.
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
    """Check the degrees of parallelism against each other and the number of devices.

    Raises:
        ValueError: A degree is below 1, or there are more places than devices.
    """
    degrees = {"tensor_parallel": tensor_parallel, "pipeline": pipeline, "data_parallel": data_parallel}
    for name, degree in degrees.items():
        if degree < 1:
            raise ValueError(f"{name}={degree} must be at least 1")
    places = tensor_parallel * pipeline * data_parallel
    if places > len(topology.devices):
        product = " × ".join(f"{name}={degree}" for name, degree in degrees.items())
        raise ValueError(f"{product} needs {places} devices, but there are {len(topology.devices)}")


def _slowest_kind(topology: Topology, group: Sequence[int]) -> str:
    """Kind and bandwidth of the slowest channel in the group's ring."""
    channels = [topology.node_channel(*hop) for hop in ring_hops(topology, group)]
    slowest = min(channels, key=lambda channel: channel.bytes_per_second)
    return f"{slowest.kind} ({slowest.bytes_per_second * 8 / 1e9:g} Gbit/s)"


def _nodes(topology: Topology, group: Sequence[int]) -> str:
    return ", ".join(topology.nodes[node].name for node in sorted({topology.devices[device].node for device in group}))


def _list(group: Sequence[int]) -> str:
    shown = ", ".join(map(str, group[:8]))
    return f"({shown}{', …' if len(group) > 8 else ''})"
