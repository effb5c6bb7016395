"""Assignment of members to places of a plan, so that the fewest bytes move between members."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from ..checkpoint.pieces import Box, cover
from ..planner.cluster.topology import Topology
from ..planner.cost.plan import Plan
from .held_layers import HeldLayers, layers_by_rank, missing_bytes

__all__ = ["Boxes", "Placement", "bytes_to_move", "place_nodes", "with_fewest_moves"]


# Fewest bytes --------------------------------------------------------------------------------------------------------


Boxes = Mapping[str, Sequence[Box]]


class Placement(NamedTuple):
    places: tuple[int | None, ...]
    """Place of each node in the new plan; None if the plan has fewer places than there are nodes."""
    moved_bytes: int
    """Bytes that the nodes with a place must get from elsewhere, all together."""


def bytes_to_move(
    held: Sequence[Boxes], needed: Sequence[Boxes], element_bytes: Mapping[str, int]
) -> NDArray[np.int64]:
    """Bytes that each place needs and each node does not hold: ``[nodes, places]``."""
    return np.array(
        [
            [
                sum(
                    element_bytes[key] * sum(piece.numel for piece in missing(boxes, have.get(key, ())))
                    for key, boxes in need.items()
                )
                for need in needed
            ]
            for have in held
        ],
        dtype=np.int64,
    ).reshape(len(held), len(needed))


def missing(needed: Sequence[Box], held: Sequence[Box]) -> list[Box]:
    """The elements of any of the needed boxes that are in none of those held, as boxes that do not overlap."""
    known = list(held)
    found: list[Box] = []
    for box in needed:
        found += cover(box, known)[1]
        known.append(box)
    return found


def place_nodes(
    costs: NDArray[np.int64],
    node_kinds: Sequence[Hashable] | None = None,
    place_kinds: Sequence[Hashable] | None = None,
) -> Placement:
    """Assign nodes to places of a new plan so that the fewest bytes move, by SciPy's Hungarian algorithm.

    ``costs`` are ``[nodes, places]``, see :func:`bytes_to_move`, with at least as many nodes as places. With kinds,
    such as the name and number of a node's devices, a node takes only places of its kind.
    """
    nodes, places = costs.shape
    if nodes < places:
        raise ValueError(f"{nodes} nodes cannot take the {places} places of the plan; make a plan for {nodes} nodes")
    priced = costs.astype(np.float64)
    if node_kinds is not None and place_kinds is not None:
        for node, kind in enumerate(node_kinds):
            priced[node, [place for place, other in enumerate(place_kinds) if other != kind]] = np.inf
    try:
        rows, columns = linear_sum_assignment(priced)
    except ValueError:
        raise ValueError(
            f"nodes of the kinds {list(node_kinds or ())} cannot take places for {list(place_kinds or ())}; make a "
            "plan for these nodes"
        ) from None
    place_of = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    return Placement(tuple(place_of.get(node) for node in range(nodes)), int(costs[rows, columns].sum()))


def with_fewest_moves(
    plan: Plan, topology: Topology, held: Sequence[HeldLayers | None], block_bytes: Sequence[float]
) -> Plan:
    """The plan with the fewest bytes to move of those with the same predictions, in which alike devices change places.

    Devices are alike if they are in one node, or in one-device nodes with the same network cards.
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
