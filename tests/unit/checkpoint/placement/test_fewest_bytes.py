"""Placement of nodes against every possible placement."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.checkpoint.pieces import Box
from colossal_hetero.elastic.seats import Boxes, bytes_to_move, place_nodes

ROWS = 6
RANGES = st.tuples(st.integers(0, ROWS - 1), st.integers(1, ROWS)).map(lambda pair: Box((pair[0],), (pair[1],)))
HELD = st.dictionaries(st.sampled_from(["a", "b"]), st.lists(RANGES, max_size=3), max_size=2)
BYTES = {"a": 4, "b": 2}


def elements(boxes: Boxes) -> set[tuple[str, int]]:
    return {
        (key, index)
        for key, found in boxes.items()
        for box in found
        for index in range(box.offsets[0], box.offsets[0] + box.sizes[0])
    }


@given(st.lists(HELD, min_size=1, max_size=6), st.data())
def test_no_other_placement_moves_fewer_bytes(held: list[Boxes], data: st.DataObject) -> None:
    needed = data.draw(st.lists(HELD, min_size=1, max_size=len(held)))
    costs = [[sum(BYTES[key] for key, _ in elements(need) - elements(have)) for need in needed] for have in held]
    assert bytes_to_move(held, needed, BYTES).tolist() == costs
    least = min(
        sum(costs[node][place] for place, node in enumerate(nodes))
        for nodes in itertools.permutations(range(len(held)), len(needed))
    )
    found = place_nodes(np.array(costs))
    assert found.moved_bytes == least
    assert sorted(place for place in found.places if place is not None) == list(range(len(needed)))


def test_a_node_takes_a_place_for_its_kind() -> None:
    costs = np.array([[0, 5], [5, 0]])
    assert place_nodes(costs, ["fast", "slow"], ["slow", "fast"]) == ((1, 0), 10)
    with pytest.raises(ValueError, match="cannot take places for"):
        place_nodes(costs, ["fast", "fast"], ["slow", "fast"])
    with pytest.raises(ValueError, match="1 nodes cannot take the 2 places"):
        place_nodes(costs[:1])
