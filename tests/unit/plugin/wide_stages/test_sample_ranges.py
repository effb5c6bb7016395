"""Groups of a stage divide the samples of a micro-batch, and each pair of groups sends the samples they share."""

from __future__ import annotations

import itertools

import pytest

from colossal_hetero.planner.cluster.shared_hops import group_exchanges
from colossal_hetero.plugin.wide_stages.sample_ranges import (
    first_too_narrow,
    lane,
    micro_batch_sizes,
    overlaps,
    place_of,
    sample_range,
)

pytestmark = pytest.mark.unit

SIZES = [(samples, width) for samples in range(1, 13) for width in range(1, samples + 1)]


@pytest.mark.parametrize(("samples", "width"), SIZES)
def test_every_sample_is_in_one_group(samples: int, width: int) -> None:
    ranges = [sample_range(samples, width, group) for group in range(width)]
    assert list(itertools.chain.from_iterable(ranges)) == list(range(samples))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= (samples % width > 0)


@pytest.mark.parametrize(("samples", "before"), SIZES)
def test_every_sample_is_sent_once_and_both_sides_agree(samples: int, before: int) -> None:
    for behind in range(1, samples + 1):
        sent: dict[tuple[int, int], list[int]] = {}
        for group in range(before):
            first = sample_range(samples, before, group).start
            for other, rows in overlaps(samples, before, group, behind):
                sent[group, other] = [first + row for row in rows]
        received: dict[tuple[int, int], list[int]] = {}
        for group in range(behind):
            first = sample_range(samples, behind, group).start
            for other, rows in overlaps(samples, behind, group, before):
                received[other, group] = [first + row for row in rows]
        assert sent == received
        assert sorted(itertools.chain.from_iterable(sent.values())) == list(range(samples))
        # Pieces of a group arrive in the order of its samples.
        for group in range(behind):
            pieces = [received[pair] for pair in sorted(received) if pair[1] == group]
            assert list(itertools.chain.from_iterable(pieces)) == list(sample_range(samples, behind, group))


@pytest.mark.parametrize(("before", "behind"), list(itertools.product(range(1, 5), repeat=2)))
def test_groups_send_what_the_planner_counts(before: int, behind: int) -> None:
    samples = 12
    planned = {(one, other): share * samples for one, other, share in group_exchanges(before, behind)}
    assert planned == {
        (group, other): len(rows) for group in range(before) for other, rows in overlaps(samples, before, group, behind)
    }


def test_equal_widths_send_to_one_group_each() -> None:
    assert [overlaps(6, 3, group, 3) for group in range(3)] == [[(group, range(2))] for group in range(3)]


def test_only_the_last_micro_batch_is_smaller() -> None:
    assert micro_batch_sizes(8, 4) == (4, 4)
    assert micro_batch_sizes(9, 4) == (4, 4, 1)
    assert first_too_narrow((4, 4, 1), (1, 2, 1)) == 1
    assert first_too_narrow((4, 4, 2), (1, 2, 1)) is None


@pytest.mark.parametrize(("samples", "width"), SIZES)
def test_all_groups_have_equally_many_micro_batches(samples: int, width: int) -> None:
    """Schedules count them by the samples of their group."""
    micro_batch = 12 // width * width
    sizes = micro_batch_sizes(samples, micro_batch)
    if first_too_narrow(sizes, (width,)) is not None:
        return  # refused
    for group in range(width):
        own = sum(len(sample_range(size, width, group)) for size in sizes)
        assert -(-own // (micro_batch // width)) == len(sizes)


REPLICA = [[(4, 5), (0, 1), (2, 3)], [(6, 7)], [(8, 9), (10, 11)]]


def test_places() -> None:
    place = place_of(REPLICA, 3)
    assert (place.widths, place.stage, place.group, place.width) == ((3, 1, 2), 0, 2, 3)
    assert place.columns == ((5, 1, 3), (7,), (9, 11))
    assert place.is_divided and not place_of([[(0, 1)], [(2, 3)]], 0).is_divided


def test_a_lane_has_a_group_of_each_stage() -> None:
    assert [lane(REPLICA, group) for group in range(3)] == [
        ((4, 5), (6, 7), (8, 9)),
        ((0, 1), (6, 7), (10, 11)),
        ((2, 3), (6, 7), (10, 11)),
    ]
    for stage, groups in enumerate(REPLICA):
        for number, group in enumerate(groups):
            assert lane(REPLICA, number)[stage] == group
