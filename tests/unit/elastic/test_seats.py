"""Members take the places of a new plan such that the fewest bytes move; compared with all ways."""

from __future__ import annotations

import itertools
import random

import pytest

from colossal_hetero.elastic.held_layers import HeldLayers, layers_by_rank, missing_bytes, with_fewest_moves
from tests.support.machines import Nodes, machines
from tests.support.planning import make_plan, unequal_plan

BLOCK_BYTES = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]


def moved(plan, held) -> float:
    return sum(missing_bytes(held[rank], needed, BLOCK_BYTES) for rank, needed in layers_by_rank(plan).items())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("sizes", [(1,) * 6, (2, 2, 1, 1)])
def test_the_fewest_bytes_move(seed: int, sizes: tuple[int, ...]) -> None:
    chance = random.Random(seed)
    topology = machines(Nodes("InfiniBand", sizes))
    plan = unequal_plan(
        make_plan([[[0], [1], [2]]], [1, 2, 3]), make_plan([[[3], [4]]], [2, 4]), make_plan([[[5]]], [6])
    )
    held = [
        None if chance.random() < 0.2 else HeldLayers((tuple(sorted(chance.sample(range(7), 2))),))  # type: ignore[arg-type]
        for _ in range(6)
    ]
    found = with_fewest_moves(plan, topology, held, BLOCK_BYTES)
    assert sorted(layers_by_rank(found)) == list(range(6))
    # Devices of a node may change places, and so may nodes with one device.
    classes = [device.node if len(topology.nodes[device.node].devices) > 1 else -1 for device in topology.devices]
    needed = layers_by_rank(plan)
    best = min(
        sum(missing_bytes(held[rank], needed[place], BLOCK_BYTES) for rank, place in enumerate(places))
        for places in itertools.permutations(range(6))
        if all(classes[rank] == classes[place] for rank, place in enumerate(places))
    )
    assert moved(found, held) == best
    for stage in (stage for replica in found.replicas for stage in replica.stages):
        assert stage.node == topology.nodes[topology.devices[stage.ranks[0]].node].name


def test_a_plan_that_everybody_has_stays() -> None:
    plan = make_plan([[[0], [1]], [[2], [3]]], [2, 4])
    held = [layers_by_rank(plan)[rank] for rank in range(4)]
    topology = machines(Nodes("RoCE", (1,) * 4))
    assert layers_by_rank(with_fewest_moves(plan, topology, held, BLOCK_BYTES)) == layers_by_rank(plan)
