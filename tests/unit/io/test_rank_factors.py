"""RANK:FACTOR options."""

from __future__ import annotations

import pytest

from colossal_hetero.common.text import parse_rank_factors
from colossal_hetero.testing.stragglers import parse_slowdowns


def test_factors_by_rank() -> None:
    assert parse_rank_factors("1:4") == {1: 4.0}
    assert parse_rank_factors("3:2.5,0:8") == {3: 2.5, 0: 8.0}
    assert parse_slowdowns(" 1:4 , 2:3 ") == {1: 4.0, 2: 3.0}


@pytest.mark.parametrize("text", ["", "2", "1:", ":4", "0:x", "x:2", "1:2,", "1:2:3", "1.5:2"])
def test_other_forms_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match="is not RANK:FACTOR; for example, 3:2"):
        parse_rank_factors(text)


def test_a_rank_given_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="rank 0 is given twice in '0:2,1:3,0:4'"):
        parse_rank_factors("0:2,1:3,0:4")
