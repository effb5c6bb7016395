"""Members that stay take what only those hold that leave."""

from __future__ import annotations

from colossal_hetero.checkpoint.pieces import Box
from colossal_hetero.elastic.moves import HeldBox, inheritance


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


def test_the_last_rank_takes_everything_once() -> None:
    assert inheritance([[rows(0, 8)], [rows(0, 8)], []], [True, True, False]) == [[], [], [rows(0, 8)]]


def test_what_two_others_hold_is_not_taken() -> None:
    assert inheritance([[rows(0, 8)], [rows(0, 8)], [rows(0, 8)], []], [True, False, False, False]) == [[], [], [], []]
