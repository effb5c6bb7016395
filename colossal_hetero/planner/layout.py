"""Which device takes which place in a 3D-parallel layout, so that each kind of traffic has the network it needs.

Holmes (section 3): tensor parallelism stays inside a node; devices are numbered cluster by cluster, stage-major, so
that each data-parallel group lies inside one cluster and sums its gradients over that cluster's RDMA network; only
pipelines cross clusters, over Ethernet.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .islands import Island, cells_of, islands_of, orders, stages_of
from .layout_costs import LayoutCosts, layout_costs
from .synchronisation import ring_hops, synchronisation_seconds
from .topology import Topology

__all__ = [
    "Compared",
    "Layout",
    "LayoutCosts",
    "Violation",
    "compare_layouts",
    "layout_costs",
    "naive_layout",
    "nic_layout",
    "synchronisation_seconds",
    "unevenness",
]

MEGABYTE = 10**6


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
    _check_degrees(topology, tensor_parallel, pipeline, data_parallel)

    def first(replica: int, stage: int) -> int:
        place = replica * pipeline + stage if dp_outside else stage * data_parallel + replica
        return place * tensor_parallel

    return Layout(
        tuple(
            tuple(tuple(range(first(d, p), first(d, p) + tensor_parallel)) for p in range(pipeline))
            for d in range(data_parallel)
        )
    )


def nic_layout(
    topology: Topology,
    tensor_parallel: int,
    pipeline: int,
    data_parallel: int,
    *,
    gradient_bytes: float | Sequence[float] = 1000 * MEGABYTE,
    activation_bytes: float = 32 * MEGABYTE,
    micro_batches: int = 8,
) -> Layout:
    """Holmes' layout: every stage's replicas in one cluster, next to each other.

    Where clusters are no multiple of a stage's devices and none can stay out, some stages must span clusters: as few
    as possible, made of what is left over. Of layouts that do equally well the one with the least :func:`layout_costs`
    under the given sizes is taken: orders of clusters and nodes, and the orders as launched. :func:`unevenness` says
    why the definition cannot hold; ``verify`` where it does not.

    Raises:
        ValueError: a degree below 1, more places than devices, nodes too small for the tensor-parallel degree, or
            devices that would have to reach each other and cannot.
    """
    islands = _islands_with_room(topology, tensor_parallel, pipeline, data_parallel)

    unreachable: list[ValueError] = []

    def rank(layout: Layout) -> tuple[float, float]:
        try:
            costs = layout_costs(topology, layout, gradient_bytes, activation_bytes, micro_batches)
            return len(layout.verify(topology)), costs.seconds
        except ValueError as error:
            unreachable.append(error)
            return math.inf, math.inf

    found = dict.fromkeys(
        stages_of(order, pipeline, data_parallel, compact) for order in orders(islands) for compact in (True, False)
    )
    candidates = [Layout(tuple(zip(*stages, strict=True))) for stages in found if stages]
    # With large activations and small gradients a pipeline inside a node may beat replicas inside a node.
    cells = {cell for island in islands for node in island for cell in node}
    launched = (naive_layout(topology, tensor_parallel, pipeline, data_parallel, outside) for outside in (True, False))
    candidates += [layout for layout in launched if cells.issuperset(layout.tensor_groups)]
    best = min(candidates, key=rank)
    if len(unreachable) == len(candidates):
        raise unreachable[0]
    return best


def unevenness(topology: Topology, tensor_parallel: int, pipeline: int, data_parallel: int) -> str | None:
    """Why no layout of these degrees keeps every data-parallel group inside a cluster on its network; None if one does.

    Raises:
        ValueError: as :func:`nic_layout`.
    """
    islands = _islands_with_room(topology, tensor_parallel, pipeline, data_parallel)
    held = [sum(map(len, island)) for island in islands]
    whole = sum(count // data_parallel for count in held)
    if whole >= pipeline:
        return None
    clusters = ", ".join(f"{count // data_parallel} of {count}" for count in held)
    possible = [(pp, dp) for pp, dp in _factors(pipeline * data_parallel) if sum(count // dp for count in held) >= pp]
    remedy = " or ".join(f"{pp} × {dp}" for pp, dp in possible)
    return (
        f"a stage takes {data_parallel} tensor-parallel groups of {tensor_parallel} with one network; the clusters' "
        f"networks hold ({clusters}) whole stages, {whole} instead of {pipeline}: {pipeline - whole} "
        f"{'stage spans' if pipeline - whole == 1 else 'stages span'} more than one. What would do, as pipeline × "
        f"data_parallel: {remedy}"
    )


@dataclass(frozen=True)
class Compared:
    """A layout beside others."""

    name: str
    layout: Layout
    costs: LayoutCosts
    violations: tuple[Violation, ...]


def compare_layouts(
    topology: Topology,
    tensor_parallel: int,
    pipeline: int,
    data_parallel: int,
    *,
    gradient_bytes_per_stage: float | Sequence[float],
    activation_bytes: float,
    micro_batches: int,
) -> tuple[Compared, ...]:
    """Groups by NIC, and what the layout would cost otherwise: in Colossal-AI's order and with ``dp_outside=False``;
    these are left out where their groups cannot reach each other.

    Raises:
        ValueError: as :func:`nic_layout` and :func:`layout_costs`.
    """
    degrees = (topology, tensor_parallel, pipeline, data_parallel)
    sizes = (gradient_bytes_per_stage, activation_bytes, micro_batches)
    ours = nic_layout(
        *degrees,
        gradient_bytes=gradient_bytes_per_stage,
        activation_bytes=activation_bytes,
        micro_batches=micro_batches,
    )
    compared = [Compared("groups by NIC", ours, layout_costs(topology, ours, *sizes), ours.verify(topology))]
    for name, outside in (("as launched (dp, pp, tp)", True), ("as launched (pp, dp, tp)", False)):
        layout = naive_layout(*degrees, dp_outside=outside)
        try:
            compared.append(Compared(name, layout, layout_costs(topology, layout, *sizes), layout.verify(topology)))
        except ValueError:
            continue
    return tuple(compared)


def _islands_with_room(topology: Topology, tensor_parallel: int, pipeline: int, data_parallel: int) -> list[Island]:
    _check_degrees(topology, tensor_parallel, pipeline, data_parallel)
    islands = islands_of(topology, tensor_parallel)
    available = sum(len(cells) for island in islands for cells in island)
    if available < pipeline * data_parallel:
        raise ValueError(
            f"{pipeline} stages of {data_parallel} replicas take {pipeline * data_parallel} tensor-parallel groups of "
            f"{tensor_parallel}, and the nodes hold {available} ({_group_counts(topology, tensor_parallel)}): a group "
            "stays inside a node, on devices of one kind; lower a degree"
        )
    return islands


def _check_degrees(topology: Topology, tensor_parallel: int, pipeline: int, data_parallel: int) -> None:
    degrees = {"tensor_parallel": tensor_parallel, "pipeline": pipeline, "data_parallel": data_parallel}
    for name, degree in degrees.items():
        if degree < 1:
            raise ValueError(f"{name}={degree} must be at least 1")
    places = tensor_parallel * pipeline * data_parallel
    if places > len(topology.devices):
        product = " × ".join(f"{name}={degree}" for name, degree in degrees.items())
        raise ValueError(f"{product} takes {places} devices, and there are {len(topology.devices)}")


def _factors(count: int) -> Iterator[tuple[int, int]]:
    return ((one, count // one) for one in range(1, count + 1) if count % one == 0)


def _group_counts(topology: Topology, tensor_parallel: int) -> str:
    counts = Counter(
        (len(node.devices), sum(1 for _ in cells_of(topology, node.devices, tensor_parallel)))
        for node in topology.nodes
    )
    return ", ".join(
        f"{nodes} nodes of {devices} devices: {groups} each" for (devices, groups), nodes in counts.items()
    )


def _slowest_kind(topology: Topology, group: Sequence[int]) -> str:
    channels = [topology.node_channel(*hop) for hop in ring_hops(topology, group)]
    slowest = min(channels, key=lambda channel: channel.bytes_per_second)
    return f"{slowest.kind} ({slowest.bytes_per_second * 8 / 1e9:g} Gbit/s)"


def _nodes(topology: Topology, group: Sequence[int]) -> str:
    return ", ".join(topology.nodes[node].name for node in sorted({topology.devices[device].node for device in group}))


def _list(group: Sequence[int]) -> str:
    shown = ", ".join(map(str, group[:8]))
    return f"({shown}{', …' if len(group) > 8 else ''})"
