"""Which rank writes and reads which file or box: each once, evenly, from the nearest place."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.checkpoint.participants import Holding, divide_files, spread
from colossal_hetero.checkpoint.pieces import Bitmap, Box, Location, StorageTier, layer_file
from colossal_hetero.checkpoint.transfers import Fetch, Need, Read, choose_sources, layer_order, reads_and_transfers

SIZES = st.lists(st.tuples(st.integers(1, 20), st.sets(st.integers(0, 2), min_size=1)), min_size=1, max_size=6)


@given(SIZES)
def test_no_single_move_helps_and_the_result_is_near_the_best(files: list[tuple[int, set[int]]]) -> None:
    sizes = {index: size for index, (size, _) in enumerate(files)}
    holders = {index: sorted(ranks) for index, (_, ranks) in enumerate(files)}
    chosen = spread(sizes, holders)
    assert all(chosen[file] in holders[file] for file in sizes)

    def most(choice: tuple[int, ...]) -> int:
        loads: Counter[int] = Counter()
        for file, holder in enumerate(choice):
            loads[holder] += sizes[file]
        return max(loads.values())

    result = tuple(chosen[file] for file in sizes)
    best = min(most(choice) for choice in itertools.product(*holders.values()))
    assert most(result) <= 2 * best
    for file in sizes:
        for other in holders[file]:
            assert most((*result[:file], other, *result[file + 1 :])) >= most(result)


def holding(rank: int, layer: str, key: str = "w", size: int = 8, nodes: str = "aabb") -> Holding:
    return Holding(rank, nodes[rank], layer, "tp0of1", key, Box((0,), (size,)), size)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("uvwxyz")), min_size=1, max_size=16, unique=True))
@pytest.mark.parametrize("with_local", [True, False])
def test_each_node_writes_each_of_its_files_once_and_each_file_is_uploaded_once(
    with_local: bool, held: list[tuple[int, str]]
) -> None:
    holdings = [holding(rank, layer) for rank, layer in held]
    division = divide_files(holdings, with_local=with_local)
    assert division == divide_files(reversed(holdings), with_local=with_local)
    local = [("aabb"[rank], file.layer) for rank, files in division.local.items() for file in files]
    assert sorted(local) == (sorted({("aabb"[rank], layer) for rank, layer in held}) if with_local else [])
    shared = [(rank, file.layer) for rank, files in division.shared.items() for file in files]
    assert sorted(layer for _, layer in shared) == sorted({layer for _, layer in held})
    assert set(shared) <= set(held)
    if with_local:  # a rank uploads what it has written
        assert all(set(files) <= set(division.local[rank]) for rank, files in division.shared.items())


def test_replicas_share_the_upload_evenly_and_names_mean_one_thing() -> None:
    division = divide_files([holding(rank, layer) for rank in (0, 2) for layer in "stuvwxyz"])
    assert [len(division.shared[rank]) for rank in (0, 2)] == [4, 4]
    with pytest.raises(ValueError, match=r"ranks 0 and 2 hold shard tp0of1 of x, but only one of them holds .* of v;"):
        divide_files([holding(0, "x"), holding(2, "x"), holding(2, "x", "v")])
    assert layer_file("x", "y.z") != layer_file("x.y", "z")


SHARED = Location("", StorageTier.SHARED)
LAYERS = [f"block-{number:04d}" for number in range(6)]


def disk(node: str) -> Location:
    return Location(node, StorageTier.DISK)


def rows(start: int, stop: int) -> Box:
    return Box((start, 0), (stop - start, 4))


def chosen(box: Box, *entries: tuple[Box, Location]) -> list[tuple[Box, Location]]:
    """What rank 0 on node "here" gets, and from where."""
    bitmap = Bitmap(7)
    for held, location in entries:
        bitmap.add("block-0000", "param.w", held, location)
    fetches = choose_sources({0: [Need("block-0000", "param.w", box, 2)]}, {0: "here"}, bitmap)[0]
    assert all(
        each.read.box == (each.box if each.read.location.tier == StorageTier.MEMORY else held)
        for each in fetches
        for held, location in entries
        if location == each.read.location and held.intersection(each.box) == each.box
    )
    return [(fetch.box, fetch.read.location) for fetch in fetches]


def test_each_part_comes_from_the_nearest_place() -> None:
    entries = (
        (rows(0, 2), Location("here", StorageTier.MEMORY)),
        (rows(0, 4), disk("here")),
        (rows(2, 6), Location("there", StorageTier.MEMORY)),
        (rows(0, 8), SHARED),
    )
    assert sorted(chosen(rows(1, 8), *entries)) == [
        (box, location)
        for box, (_, location) in zip((rows(1, 2), rows(2, 4), rows(4, 6), rows(6, 8)), entries, strict=True)
    ]

    # Other nodes give evenly, and a box that is nowhere is named.
    fetched = chosen(rows(0, 12), *((rows(row, row + 1), disk(node)) for row in range(12) for node in "abc"))
    assert Counter(location.node for _, location in fetched) == {"a": 4, "b": 4, "c": 4}
    with pytest.raises(LookupError, match=r"param.w of step 7 at \(2, 0\) with sizes \(1, 4\)"):
        chosen(rows(0, 3), (rows(0, 2), disk("a")))


def fetch(layer: str, location: Location, start: int = 0, stop: int = 10) -> Fetch:
    box = Box((start,), (stop - start,))
    return Fetch(box, 4 * box.numel, Read(layer, f"param.{layer}", Box((0,), (10,)), location))


def test_what_the_shared_folder_has_is_read_once_and_evenly() -> None:
    fetches = {rank: [fetch(layer, SHARED) for layer in LAYERS] for rank in range(3)}
    reads, transfers = reads_and_transfers(fetches, dict(enumerate("aab")))
    assert sorted(read.layer for of_rank in reads.values() for read in of_rank) == LAYERS
    assert [len(reads[rank]) for rank in range(3)] == [2, 2, 2]
    assert len(transfers) == 12
    for each in transfers:
        assert each.layer in {read.layer for read in reads[each.sender]} and each.sender != each.receiver
    # Layers in different places take turns: else the disk of one node would wait for that of the other.
    found = {0: [Read(layer, "x", Box((0,), (1,)), disk(node)) for layer, node in zip(LAYERS, "aabb", strict=False)]}
    assert layer_order(found) == ["block-0000", "block-0002", "block-0001", "block-0003"]


@given(st.data())
def test_all_get_what_they_need_and_no_more_is_read_than_is_needed(data: st.DataObject) -> None:
    """Files of two halves of tensors, on some of three nodes or in the shared folder alone."""
    node_of = dict(enumerate(data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=5))))
    bitmap, needs = Bitmap(), defaultdict(list)
    for layer in LAYERS[:3]:
        for half in (rows(0, 4), rows(4, 8)):
            nodes = data.draw(st.sets(st.sampled_from(sorted(set(node_of.values())))))
            for location in [disk(node) for node in nodes] or [SHARED]:
                bitmap.add(layer, layer, half, location)
        cuts = [0, *sorted(data.draw(st.sets(st.integers(1, 7), max_size=3))), 8]
        for start, stop in itertools.pairwise(cuts):
            for rank in data.draw(st.sets(st.sampled_from(sorted(node_of)), min_size=1)):
                needs[rank].append(Need(layer, layer, rows(start, stop), 4))
    fetches = choose_sources({rank: needs[rank] for rank in node_of}, node_of, bitmap)
    reads, transfers = reads_and_transfers(fetches, node_of)
    for rank, of_rank in fetches.items():
        own = [(read.key, read.box) for read in reads[rank]]
        assert len(own) == len(set(own))
        assert all(read.location.node in (node_of[rank], "") for read in reads[rank])
        received = [(each.key, each.box) for each in transfers if each.receiver == rank]
        for each in of_rank:
            is_read = (each.read.key, each.read.box) in own
            assert is_read + received.count((each.read.key, each.box)) == 1
    for each in transfers:
        assert any(read.key == each.key and read.box.intersection(each.box) == each.box for read in reads[each.sender])
    needed, read_elements = Counter[tuple[str, Box]](), Counter[tuple[str, Box]]()
    for of_rank in fetches.values():
        for each in of_rank:
            needed[each.read.key, each.read.box] += each.box.numel
    for read in (read for of_rank in reads.values() for read in of_rank):
        read_elements[read.key, read.box] += read.box.numel
    assert all(read_elements[each] <= needed[each] for each in needed)
