"""The best plan for the devices that are there. Equal sets of devices are planned for once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy.optimize import linear_sum_assignment

from ...planner.cluster.topology import Channel, Device, Node, Topology
from ...planner.plans.plan import Plan
from ...planner.profile.as_profiled import as_profiled
from ...planner.profile.layer_profile import ModelProfile
from ...planner.search.make_plans import make_plans
from ..state.held_layers import HeldLayers, Holdings, layers_by_rank, missing_bytes

__all__ = ["FitPlan", "FittedPlan", "FittedPlans", "is_faster", "slowest_channel", "state_bytes_by_block"]

NodeShape = tuple[int, tuple[int, ...]]
"""What of a node is there: the class of the node, and the classes of its devices that are there, ascending."""


@dataclass(frozen=True)
class FittedPlan:
    """A plan on the devices that are there."""

    iteration_seconds: float
    holdings: Holdings
    """By device in use: what it holds. Devices that are left out are spares."""
    move_seconds: float = 0.0
    """Time to bring to each node what its devices lack."""


class FitPlan(Protocol):
    """Finds the best plan for these devices, which hold ``held`` already; None if no plan fits."""

    def __call__(self, devices: frozenset[int], held: Holdings) -> FittedPlan | None: ...


def is_faster(plan: FittedPlan, present: FittedPlan) -> bool:
    """Whether a plan is faster than the present one by more than rounding."""
    return plan.iteration_seconds < present.iteration_seconds * (1 - 1e-9)


class FittedPlans:
    """Finds plans with the planner, and places them on the devices so that the fewest bytes move.

    Nodes that are alike, and devices of one node that are alike, can take each other's place. The plan of a set of
    devices therefore depends only on the kinds of its devices and how they are divided over nodes.

    Args:
        topology: The whole cluster.
        profile: Times and sizes of the model's layers.
        global_batch: Samples per iteration.
        micro_batches: Sizes to try, in samples. None: all in the profile.
        tensor_parallel: Degrees to try. None: all in the profile.
        options: Further arguments of :func:`~colossal_hetero.planner.search.make_plans.make_plans`.
        link: The channel over which a node gets what its devices lack. All nodes get theirs at the same time.

    Raises:
        ValueError: There is no plan for the whole cluster; the message says why.
    """

    def __init__(
        self,
        topology: Topology,
        profile: ModelProfile,
        *,
        global_batch: int,
        link: Channel,
        micro_batches: Sequence[int] | None = None,
        tensor_parallel: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        self._topology = as_profiled(topology, profile)
        # Each device has its measured times now, so the ranks that measured them are no longer needed.
        self._profile = profile.model_copy(update={"rank_devices": ()})
        self._global_batch, self._link = global_batch, link
        self._options = dict(micro_batches=micro_batches, tensor_parallel=tensor_parallel, **options)
        self._block_bytes = state_bytes_by_block(profile)
        node_classes: dict[object, int] = {}
        self._node_classes = [
            node_classes.setdefault((node.cluster, node.nics, node.inside, node.inside_bytes_per_second), number)
            for number, node in enumerate(self._topology.nodes)
        ]
        device_classes: dict[object, int] = {}
        self._device_classes = [
            device_classes.setdefault((device.kind, device.speed), number)
            for number, device in enumerate(self._topology.devices)
        ]
        everything = self._shapes(frozenset(range(len(self._topology.devices))))
        # A mistake in the arguments has its own message here. From now on, an error means that no plan fits.
        whole = self._make_plan(list(everything.values()))
        self._plans: dict[tuple[NodeShape, ...], Plan | None] = {tuple(sorted(everything.values())): whole}

    @property
    def planned(self) -> int:
        """For how many different sets of devices a plan was looked for."""
        return len(self._plans)

    def __call__(self, devices: frozenset[int], held: Holdings) -> FittedPlan | None:
        """As :class:`FitPlan` says."""
        if not devices:
            return None
        shapes = self._shapes(devices)
        key = tuple(sorted(shapes.values()))
        if key not in self._plans:
            try:
                self._plans[key] = self._make_plan(key)
            except ValueError:
                self._plans[key] = None
        plan = self._plans[key]
        if plan is None:
            return None
        holdings = self._placed(plan, key, shapes, devices, held)
        return FittedPlan(plan.iteration_seconds, holdings, self._move_seconds(holdings, held))

    def _shapes(self, devices: frozenset[int]) -> dict[int, NodeShape]:
        """By node with devices that are there: its shape."""
        shapes: dict[int, NodeShape] = {}
        for number, node in enumerate(self._topology.nodes):
            there = tuple(sorted(self._device_classes[device] for device in node.devices if device in devices))
            if there:
                shapes[number] = (self._node_classes[number], there)
        return shapes

    def _make_plan(self, shapes: Sequence[NodeShape]) -> Plan:
        """The best plan for nodes of these shapes. Its ranks are counted shape by shape, in ascending order."""
        whole = self._topology
        nodes, devices = list[Node](), list[Device]()
        for number, (node, there) in enumerate(sorted(shapes)):
            ranks = tuple(range(len(devices), len(devices) + len(there)))
            nodes.append(dataclasses.replace(whole.nodes[node], devices=ranks))
            cluster = whole.nodes[node].cluster
            devices += [dataclasses.replace(whole.devices[each], node=number, cluster=cluster) for each in there]
        part = dataclasses.replace(whole, devices=tuple(devices), nodes=tuple(nodes))
        plans = make_plans(
            part,
            self._profile,
            global_batch=self._global_batch,
            keep=1,
            **self._options,
        )
        return plans[0].plan

    def _placed(
        self,
        plan: Plan,
        key: Sequence[NodeShape],
        shapes: Mapping[int, NodeShape],
        devices: frozenset[int],
        held: Holdings,
    ) -> dict[int, HeldLayers]:
        """The plan's layers by device, placed so that the fewest bytes move."""
        layers, start = layers_by_rank(plan), 0
        placed: dict[int, HeldLayers] = {}
        places: dict[NodeShape, list[range]] = {}
        for shape in key:
            places.setdefault(shape, []).append(range(start, start + len(shape[1])))
            start += len(shape[1])
        for shape, alike in places.items():
            nodes = [node for node, each in shapes.items() if each == shape]
            options = [[self._inside(node, ranks, shape, layers, devices, held) for ranks in alike] for node in nodes]
            rows, columns = linear_sum_assignment(np.array([[cost for cost, _ in row] for row in options]))
            for row, column in zip(rows, columns, strict=True):
                placed.update(options[row][column][1])
        return placed

    def _inside(
        self,
        node: int,
        ranks: range,
        shape: NodeShape,
        layers: Mapping[int, HeldLayers],
        devices: frozenset[int],
        held: Holdings,
    ) -> tuple[float, dict[int, HeldLayers]]:
        """Layers by device if ``node`` takes the place of these ranks, and the bytes that it must get."""
        total, placed = 0.0, dict[int, HeldLayers]()
        for kind in set(shape[1]):
            mine = [
                device
                for device in self._topology.nodes[node].devices
                if device in devices and self._device_classes[device] == kind
            ]
            wanted = [layers.get(rank) for rank, each in zip(ranks, shape[1], strict=True) if each == kind]
            costs = np.array(
                [[missing_bytes(held.get(device), want, self._block_bytes) for want in wanted] for device in mine]
            )
            rows, columns = linear_sum_assignment(costs)
            total += float(costs[rows, columns].sum())
            for row, column in zip(rows, columns, strict=True):
                want = wanted[column]
                if want is not None:
                    placed[mine[row]] = want
        return total, placed

    def _move_seconds(self, holdings: Holdings, held: Holdings) -> float:
        by_node: dict[int, float] = {}
        for device, layers in holdings.items():
            node = self._topology.devices[device].node
            by_node[node] = by_node.get(node, 0.0) + missing_bytes(held.get(device), layers, self._block_bytes)
        return self._link.seconds(max(by_node.values(), default=0.0))


def slowest_channel(topology: Topology) -> Channel:
    """The channel between two nodes that takes longest for large messages; of a single node, the one inside it.

    Raises:
        ValueError: Two nodes cannot reach each other.
    """
    count = len(topology.nodes)
    channels = [topology.node_channel(a, b) for a in range(count) for b in range(a)]
    return min(channels or [topology.nodes[0].inside], key=lambda channel: channel.bandwidth(1e9))


def state_bytes_by_block(profile: ModelProfile) -> list[float]:
    """Bytes of parameters and optimizer state by block, all tensor-parallel parts together.

    This is the state on devices without gradients: what moves between devices, and what a checkpoint holds. Embedding
    and head belong to the first and the last block.
    """
    device = profile.devices[0]
    degree = profile.tensor_parallel_degrees(device)[0]
    costs = profile.costs(device, degree, profile.micro_batches(device, degree)[0])
    return [max(float(each), 0.0) for each in (costs.state_bytes - costs.gradient_bytes) * degree]
