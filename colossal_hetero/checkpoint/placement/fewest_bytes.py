"""Which node takes which place of a new plan, so that the fewest bytes move between nodes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from ..format.box import Box, cover

__all__ = ["Boxes", "Placement", "bytes_to_move", "place_nodes"]

Boxes = Mapping[str, Sequence[Box]]
"""Boxes of tensors, by their keys."""


class Placement(NamedTuple):
    """Where nodes go."""

    places: tuple[int | None, ...]
    """By node: its place in the new plan, or None if the plan has fewer places than there are nodes."""
    moved_bytes: int
    """What the nodes with a place must get from elsewhere, all together."""


def bytes_to_move(
    held: Sequence[Boxes], needed: Sequence[Boxes], element_bytes: Mapping[str, int]
) -> NDArray[np.int64]:
    """``[nodes, places]``: what each place needs and each node does not hold, in bytes.

    Args:
        held: by node. A node that joins holds nothing.
        needed: by place of the new plan: what all ranks of a node need there. Boxes of one tensor may overlap.
        element_bytes: bytes of an element of each tensor.
    """
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
    """Assign nodes to the places of a new plan, so that the bytes that move are the fewest possible.

    The Hungarian algorithm, as SciPy has it.

    Args:
        costs: ``[nodes, places]``, see :func:`bytes_to_move`. There are at least as many nodes as places.
        node_kinds: what each node is, such as the name and number of its devices. None: all are alike.
        place_kinds: what each place is for.

    Raises:
        ValueError: there are fewer nodes than places, or too few of a kind.
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
