"""What an iteration of a plan costs: the nodes for as long as it takes, and what is sent between clusters."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ..cluster.topology import Topology
from ..plans.plan import Plan, StagePlan
from ..profile.layer_costs import LayerCosts
from ..profile.layer_profile import ModelProfile

__all__ = ["PlanCost", "check_prices", "plan_cost"]

GIGABYTE = 1e9
HOUR = 3600.0


@dataclass(frozen=True)
class PlanCost:
    """Prices in dollars."""

    dollars_per_hour: float
    """Of all nodes of which the plan uses a device. A node is paid for as a whole."""
    egress_dollars: float
    """Per iteration, of what is sent between clusters."""
    iteration_seconds: float

    @property
    def dollars_per_iteration(self) -> float:
        return self.dollars_per_hour * self.iteration_seconds / HOUR + self.egress_dollars


def check_prices(topology: Topology) -> None:
    """Check that the price of each node is known.

    Raises:
        ValueError: it is not; the message names the nodes.
    """
    unknown = [node.name for node in topology.nodes if node.dollars_per_hour is None]
    if unknown:
        names = ", ".join(unknown[:4]) + (f" and {len(unknown) - 4} others" if len(unknown) > 4 else "")
        raise ValueError(
            f"the price of {names} is not known; give these nodes dollars_per_hour in the cluster file, or their kinds "
            "of devices: [kinds.NAME] with dollars_per_hour"
        )


def plan_cost(topology: Topology, profile: ModelProfile, plan: Plan) -> PlanCost:
    """What an iteration of ``plan`` costs.

    Args:
        topology: with prices; see :func:`check_prices`.
        profile: of the model.
        plan: with ranks numbered as in ``topology``.
    """
    used = sorted({topology.devices[rank].node for replica in plan.rank_order for stage in replica for rank in stage})
    check_prices(topology)
    rate = sum(topology.nodes[number].dollars_per_hour or 0.0 for number in used)
    prices = {frozenset((one, other)): price for one, other, price in topology.egress}
    dollars = 0.0
    if prices:
        for a, b, sent in _sent_bytes(topology, profile, plan):
            dollars += prices.get(frozenset((a, b)), 0.0) * sent / GIGABYTE
    return PlanCost(rate, dollars, plan.iteration_seconds)


def _sent_bytes(topology: Topology, profile: ModelProfile, plan: Plan) -> list[tuple[int, int, float]]:
    """Bytes per iteration between devices of different clusters: the numbers of both clusters, and the bytes."""
    cluster = [device.cluster for device in topology.devices]
    sent: list[tuple[int, int, float]] = []

    def send(one: int, other: int, message: float) -> None:
        if cluster[one] != cluster[other]:
            sent.append((cluster[one], cluster[other], message))

    for replica in plan.replicas:
        for before, after in pairwise(replica.stages):
            # Activations one way and their gradients the other; each member of a tensor-parallel group sends all. If
            # groups have different sizes, as many members send as the smaller group has.
            output_bytes = _sizes(profile, plan, before).output_bytes[before.blocks[1] - 1]
            message = 2.0 * replica.micro_batches * float(output_bytes)
            for one, other in zip(before.ranks, after.ranks, strict=False):
                send(one, other, message)
    for block in range(plan.blocks):
        holders = _holders(plan, block)
        # With different degrees, there are as many rings as the smallest group has members, see gradient_times.py.
        smallest = min(holders, key=plan.degree)
        gradients = float(_sizes(profile, plan, smallest).gradient_bytes[block])
        for place in range(plan.degree(smallest)):
            ring = [stage.ranks[place] for stage in holders]
            message = 2.0 * (len(ring) - 1) / len(ring) * gradients
            for one, other in zip(ring, [*ring[1:], ring[0]], strict=True):
                send(one, other, message)
    return sent


def _holders(plan: Plan, block: int) -> list[StagePlan]:
    """The stages that sum the gradients of a block, one of each replica."""
    return [
        next(stage for stage in replica.stages if any(start <= block < stop for start, stop in stage.block_ranges))
        for replica in plan.replicas
    ]


def _sizes(profile: ModelProfile, plan: Plan, stage: StagePlan) -> LayerCosts:
    """Sizes of the model's blocks in a stage; they do not depend on the kind of device."""
    return profile.costs(stage.device, plan.degree(stage), plan.micro_batch)
