"""Which member takes which place of a plan, so that the fewest bytes move between members."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from ...checkpoint.placement.fewest_bytes import place_nodes
from ...planner.cluster.topology import Topology
from ...planner.plans.plan import Plan
from .held_layers import HeldLayers, layers_by_rank, missing_bytes

__all__ = ["with_fewest_moves"]


def with_fewest_moves(
    plan: Plan, topology: Topology, held: Sequence[HeldLayers | None], block_bytes: Sequence[float]
) -> Plan:
    """The plan with ranks in other places, such that its predictions stay and the fewest bytes move.

    Ranks change places if their devices are alike: in the same node, or in nodes with one device each and the same
    network cards.

    Args:
        plan: for all devices of the topology.
        topology: devices are numbered like the ranks.
        held: what each rank holds, by rank; None if it has just joined.
        block_bytes: of parameters and optimizer state, by block.
    """
    needed = layers_by_rank(plan)
    ranks = range(len(held))
    costs = np.array(
        [[round(missing_bytes(held[rank], needed[place], block_bytes)) for place in ranks] for rank in ranks]
    )
    kinds = [_kind(topology, rank) for rank in ranks]
    places = place_nodes(costs, kinds, kinds).places
    rank_at = {place: rank for rank, place in enumerate(places)}
    replicas = tuple(
        replica.model_copy(
            update={
                "stages": tuple(
                    stage.model_copy(
                        update={
                            "ranks": tuple(rank_at[place] for place in stage.ranks),
                            "node": topology.nodes[topology.devices[rank_at[stage.ranks[0]]].node].name,
                        }
                    )
                    for stage in replica.stages
                )
            }
        )
        for replica in plan.replicas
    )
    return plan.model_copy(update={"replicas": replicas})


def _kind(topology: Topology, rank: int) -> Hashable:
    device = topology.devices[rank]
    node = topology.nodes[device.node]
    place: Hashable = device.node if len(node.devices) > 1 else (node.cluster, node.nics)
    return device.kind, device.speed, place
