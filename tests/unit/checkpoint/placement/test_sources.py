"""The nearest place is chosen, and other nodes give evenly."""

from __future__ import annotations

from collections import Counter

import pytest

from colossal_hetero.checkpoint.pieces import Bitmap, Box, Location, StorageTier
from colossal_hetero.checkpoint.transfers import Need, choose_sources

STEP = 7


def rows(start: int, stop: int) -> Box:
    return Box((start, 0), (stop - start, 4))


def bitmap_of(*entries: tuple[Box, str, StorageTier]) -> Bitmap:
    bitmap = Bitmap()
    for box, node, tier in entries:
        bitmap.add(STEP, "block-0000", "param.w", box, Location(node, tier))
    return bitmap


def chosen(bitmap: Bitmap, box: Box, node: str = "here") -> list[tuple[Box, Location]]:
    needs = {0: [Need("block-0000", "param.w", box, 2)]}
    return [(fetch.box, fetch.location) for fetch in choose_sources(STEP, needs, {0: node}, bitmap)[0]]


def test_each_part_comes_from_the_nearest_place() -> None:
    bitmap = bitmap_of(
        (rows(0, 2), "here", StorageTier.MEMORY),
        (rows(0, 4), "here", StorageTier.DISK),
        (rows(2, 6), "there", StorageTier.MEMORY),
        (rows(0, 8), "", StorageTier.SHARED),
    )
    assert sorted(chosen(bitmap, rows(1, 8))) == [
        (rows(1, 2), Location("here", StorageTier.MEMORY)),
        (rows(2, 4), Location("here", StorageTier.DISK)),
        (rows(4, 6), Location("there", StorageTier.MEMORY)),
        (rows(6, 8), Location("", StorageTier.SHARED)),
    ]


def test_other_nodes_give_evenly() -> None:
    bitmap = bitmap_of(*((rows(row, row + 1), node, StorageTier.DISK) for row in range(12) for node in "abc"))
    fetched = chosen(bitmap, rows(0, 12))
    assert Counter(location.node for _, location in fetched) == {"a": 4, "b": 4, "c": 4}


def test_a_box_that_is_nowhere_is_named() -> None:
    with pytest.raises(LookupError, match=r"param.w of step 7 at \(2, 0\) with sizes \(1, 4\)"):
        chosen(bitmap_of((rows(0, 2), "a", StorageTier.DISK)), rows(0, 3))
