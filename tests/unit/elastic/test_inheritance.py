"""Members that stay take what only those hold that leave."""

from __future__ import annotations

from colossal_hetero.checkpoint.format.box import Box
from colossal_hetero.elastic.state.moves import HeldBox, inheritance


def rows(start: int, stop: int, key: str = "param.w") -> HeldBox:
    return HeldBox("block-0000", key, (8, 4), "float32", Box((start, 0), (stop - start, 4)))


def test_each_lost_box_is_taken_once_and_evenly() -> None:
    holdings = [[rows(0, 8)], [rows(0, 2)], [rows(4, 5)], [rows(0, 8), rows(0, 8, "exp_avg.w")]]
    taken = inheritance(holdings, [True, False, False, True])
    assert taken[0] == taken[3] == []
    assert sorted(each.box.offsets[0] for of_rank in taken for each in of_rank if each.key == "param.w") == [2, 5]
    elements = [sum(each.box.numel for each in of_rank) for of_rank in taken]
    assert sum(elements) == 4 * (2 + 3) + 4 * 8
    assert all(elements[1:3])


def test_what_others_hold_is_not_taken() -> None:
    assert inheritance([[rows(0, 8)], [rows(0, 8)]], [True, False]) == [[], []]
