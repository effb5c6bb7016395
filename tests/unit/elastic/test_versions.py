"""Which state counts after a world has broken, and what each rank does."""

from __future__ import annotations

from colossal_hetero.elastic.held_layers import CatchUp, Standing, agree

NEW = Standing(None, False, None)


def test_new_ranks_agree_that_there_is_nothing() -> None:
    assert agree([NEW, NEW]) is None


def test_the_running_step_is_given_up_if_nobody_has_made_it() -> None:
    agreed = agree([Standing(4, True, "four"), Standing(4, False, "four"), NEW])
    assert agreed is not None and agreed.version == 4
    assert agreed.catch_ups == (CatchUp.KEEP, CatchUp.KEEP, CatchUp.FORGET)


def test_a_step_that_somebody_has_made_is_made_by_all() -> None:
    agreed = agree([Standing(4, True, "four"), Standing(5, False, "five")])
    assert agreed is not None and (agreed.version, agreed.commit) == (5, "five")
    assert agreed.catch_ups == (CatchUp.STEP, CatchUp.KEEP)


def test_a_rank_that_was_left_behind_forgets() -> None:
    agreed = agree([Standing(3, True, "three"), Standing(4, False, "four"), Standing(5, False, "five")])
    assert agreed is not None
    assert agreed.catch_ups == (CatchUp.FORGET, CatchUp.FORGET, CatchUp.KEEP)
