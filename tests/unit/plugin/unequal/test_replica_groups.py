"""Groups of ranks within a replica whose stages have several groups."""

from __future__ import annotations

import pytest

from colossal_hetero.plugin.unequal.replica_mesh import groups_of, make_replica_groups, stand_ins
from colossal_hetero.plugin.wide_stages.sample_ranges import lane

pytestmark = pytest.mark.unit

REPLICA = [[(0, 1), (2, 3)], [(4, 5)], [(6, 7), (8, 9), (10, 11)]]


def test_groups_of_a_replica_of_one_group_per_stage() -> None:
    assert set(groups_of([[(0, 1)], [(2, 3)]])) == {
        *((0, 1), (2, 3)),  # tensor parallel
        *((0,), (1,), (2,), (3,)),
        *((0, 2), (1, 3)),  # pipelines
        (0, 1, 2, 3),
    }


def test_only_the_first_pipeline_has_groups() -> None:
    columns = {(0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11)}
    several = {ranks for ranks in groups_of(REPLICA) if len(ranks) > 1}
    assert several == {
        *(group for stage in REPLICA for group in stage),
        *((0, 4, 6), (1, 5, 7), (0, 6), (1, 7), (0, 1, 4, 5, 6, 7)),
        *((6, 8, 10), (7, 9, 11)),  # the loss and the outputs
        *columns,  # messages between stages
    }
    assert set(stand_ins(REPLICA).values()) == columns


def test_every_rank_finds_the_groups_of_its_pipeline() -> None:
    made: list[tuple[int, ...]] = []
    groups = make_replica_groups([REPLICA, [[(12, 13)], [(14, 15)]]], lambda ranks: made.append(ranks) or ranks)
    assert len(made) == len(set(made)) == len(groups)
    instead = stand_ins(REPLICA)
    assert not instead.keys() & groups.keys()
    for number in range(3):
        for column in zip(*lane(REPLICA, number), strict=True):
            for ranks in (column, (column[0], column[-1])):
                assert set(ranks) <= set(groups[instead.get(ranks, ranks)])
