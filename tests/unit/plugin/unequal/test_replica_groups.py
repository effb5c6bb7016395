"""Groups of ranks within a replica."""

from __future__ import annotations

import pytest

from colossal_hetero.plugin.replicas.unequal_replicas import groups_of

pytestmark = pytest.mark.unit


def test_groups_of_a_replica() -> None:
    assert set(groups_of([(0, 1), (2, 3), (4, 5)])) == {
        *((0, 1), (2, 3), (4, 5)),  # tensor parallel
        *((0,), (1,), (2,), (3,), (4,), (5,)),
        *((0, 2, 4), (1, 3, 5)),  # pipelines
        *((0, 4), (1, 5)),  # stages that share weights
        (0, 1, 2, 3, 4, 5),
    }
