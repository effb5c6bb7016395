"""What devices hold, whose state counts after a world has broken, and who takes which place and which layers."""

from __future__ import annotations

import itertools
import random

import pytest

from colossal_hetero.checkpoint.pieces import Box
from colossal_hetero.elastic.held_layers import (
    CatchUp,
    HeldBox,
    HeldLayers,
    Standing,
    agree,
    inheritance,
    layers_by_rank,
    missing_bytes,
    surviving_topology,
    with_fewest_moves,
)
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


NEW = Standing(None, False, None)


def test_ranks_agree_on_a_version() -> None:
    for standings, commit, catch_ups in (
        # The running step is given up if nobody has made it.
        ([Standing(4, True, "four"), Standing(4, False, "four"), NEW], "four", "KEEP KEEP FORGET"),
        # A step that somebody has made is made by all.
        ([Standing(4, True, "four"), Standing(5, False, "five")], "five", "STEP KEEP"),
        # A rank that was left behind forgets.
        (
            [Standing(3, True, "3"), Standing(4, False, "four"), Standing(5, False, "five")],
            "five",
            "FORGET FORGET KEEP",
        ),
    ):
        agreed = agree(standings)
        assert agreed is not None and (agreed.version, agreed.commit) == ({"four": 4, "five": 5}[commit], commit)
        assert agreed.catch_ups == tuple(CatchUp[each] for each in catch_ups.split())
    assert agree([NEW, NEW]) is None


CLUSTER = machines(Nodes("InfiniBand", (2, 1)), Nodes("RoCE", (3,)))


def test_devices_are_those_of_the_members() -> None:
    found = surviving_topology(CLUSTER, ["node-0", "node-2", "node-2"])
    assert [node.name for node in found.nodes] == ["node-0", "node-2"]
    assert [node.devices for node in found.nodes] == [(0,), (1, 2)]
    assert [device.node for device in found.devices] == [0, 1, 1]
    assert found.channel(0, 1).kind == "Ethernet" and found.channel(1, 2).kind == "NVLink"

    for nodes, message in (
        (["node-9"], "node node-9 is not in the cluster file"),
        (["node-1"] * 2, "1 devices .* but 2 members"),
    ):
        with pytest.raises(ValueError, match=message):
            surviving_topology(CLUSTER, nodes)


def rows(start: int, stop: int, key: str = "param.w") -> HeldBox:
    return HeldBox("block-0000", key, (8, 4), "float32", Box((start, 0), (stop - start, 4)))


def copies(row: int, held: list[list[HeldBox]], key: str) -> int:
    inside = [
        each.box.offsets[0] <= row < each.box.offsets[0] + each.box.sizes[0]
        for of in held
        for each in of
        if each.key == key
    ]
    return sum(inside)


def test_two_ranks_hold_afterwards_what_the_leaving_held() -> None:
    holdings = [[rows(0, 8)], [rows(0, 2)], [rows(4, 5)], [rows(0, 8), rows(0, 8, "exp_avg.w")], []]
    taken = inheritance(holdings, [True, False, False, True, False])
    assert taken[0] == taken[3] == []
    after = [[*own, *more] for own, more in zip(holdings[1:3] + holdings[4:], taken[1:3] + taken[4:], strict=True)]
    for key in ("param.w", "exp_avg.w"):
        assert all(copies(row, after, key) == 2 for row in range(8))
    assert all(taken[rank] for rank in (1, 2, 4))

    # The last rank takes everything once, and what two others hold is not taken.
    assert inheritance([[rows(0, 8)], [rows(0, 8)], []], [True, True, False]) == [[], [], [rows(0, 8)]]
    assert inheritance([[rows(0, 8)], [rows(0, 8)], [rows(0, 8)], []], [True, False, False, False]) == [[], [], [], []]
