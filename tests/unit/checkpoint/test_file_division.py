"""Which rank writes which file: each once, evenly, and only ranks that hold it."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.checkpoint.participants import Holding, divide_files, spread
from colossal_hetero.checkpoint.pieces import Box, layer_file

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


def test_replicas_share_the_upload_evenly() -> None:
    division = divide_files([holding(rank, layer) for rank in (0, 2) for layer in "stuvwxyz"])
    assert [len(division.shared[rank]) for rank in (0, 2)] == [4, 4]


def test_ranks_that_hold_different_boxes_under_one_name_are_named() -> None:
    with pytest.raises(ValueError, match=r"ranks 0 and 2 hold shard tp0of1 of x, but only one of them holds .* of v;"):
        divide_files([holding(0, "x"), holding(2, "x"), holding(2, "x", "v")])


def test_files_have_different_names() -> None:
    assert layer_file("x", "y.z") != layer_file("x.y", "z")
