"""What is sent is read once, what only the shared folder has is read by one rank, and all places are busy."""

from __future__ import annotations

from collections import Counter

from colossal_hetero.checkpoint.pieces import Box, Location, StorageTier
from colossal_hetero.checkpoint.transfers import Fetch, Read, layer_order, reads_and_transfers

SHARED = Location("", StorageTier.SHARED)


def fetch(layer: str, location: Location) -> Fetch:
    return Fetch(layer, f"param.{layer}", Box((0,), (10,)), location, 40)


def disk(node: str) -> Location:
    return Location(node, StorageTier.DISK)


def test_what_the_shared_folder_has_is_read_once_and_evenly() -> None:
    layers = [f"block-{number:04d}" for number in range(6)]
    reads, transfers = reads_and_transfers(
        {rank: [fetch(layer, SHARED) for layer in layers] for rank in range(3)}, dict(enumerate("aab"))
    )
    assert sorted(read.layer for of_rank in reads.values() for read in of_rank) == layers
    assert [len(reads[rank]) for rank in range(3)] == [2, 2, 2]
    assert len(transfers) == 12
    for each in transfers:
        assert each.layer in {read.layer for read in reads[each.sender]} and each.sender != each.receiver


def test_ranks_read_their_own_disk_and_one_of_them_sends() -> None:
    """Ranks 0 and 1 have the disk of node a, and need what it has; ranks 2 and 3 need it too."""
    layers = [f"block-{number:04d}" for number in range(4)]
    reads, transfers = reads_and_transfers(
        {rank: [fetch(layer, disk("a")) for layer in layers] for rank in range(4)}, dict(enumerate("aabb"))
    )
    assert [len(reads[rank]) for rank in range(4)] == [4, 4, 0, 0]
    assert Counter((each.layer, each.receiver) for each in transfers) == dict.fromkeys(
        ((layer, rank) for layer in layers for rank in (2, 3)), 1
    )
    assert Counter(each.sender for each in transfers) == {0: 4, 1: 4}
    for layer in layers:  # from the disk, a sender reads a box once
        assert len({each.sender for each in transfers if each.layer == layer}) == 1


def test_a_node_that_does_not_need_a_box_reads_it_once_to_send_it() -> None:
    reads, transfers = reads_and_transfers({0: [], 1: [fetch("head", disk("a"))], 2: [fetch("head", disk("a"))]},
                                           dict(enumerate("abc")))  # fmt: skip
    assert [len(reads[rank]) for rank in range(3)] == [1, 0, 0]
    assert {(each.sender, each.receiver) for each in transfers} == {(0, 1), (0, 2)}


def test_layers_in_different_places_take_turns() -> None:
    """Otherwise the disk of one node would wait for that of the other."""
    places = {"block-0000": "a", "block-0001": "a", "block-0002": "b", "block-0003": "b"}
    reads = {0: [Read(layer, "x", Box((0,), (1,)), disk(node)) for layer, node in places.items()]}
    assert layer_order(reads) == ["block-0000", "block-0002", "block-0001", "block-0003"]
