"""AutoHet's groups against all others."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.autohet_groups import MemberKind, find_grouping
from tests.support.random_examples import examples


def power_of(group: Sequence[int], kinds: Sequence[MemberKind], micro_batches: float) -> float:
    """AutoHet's Eq. 2 as printed."""
    stages = sum(group)
    bubbles = (stages - 1) / (micro_batches + stages - 1)
    return sum(count * kind.power for count, kind in zip(group, kinds, strict=True)) * (1 - bubbles)


def partitions(left: tuple[int, ...], at_most: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Every division of the counts into groups that do not increase in lexical order."""
    if not any(left):
        yield []
    for group in np.ndindex(*(count + 1 for count in left)):
        if any(group) and group <= at_most:
            rest = tuple(a - b for a, b in zip(left, group, strict=True))
            for others in partitions(rest, group):
                yield [group, *others]


def exhaustive(
    kinds: Sequence[MemberKind], model_bytes: float, micro_batches: float, most: int, groups: int | None
) -> float:
    counts = tuple(kind.count for kind in kinds)
    best = 0.0
    for each in partitions(counts, counts):
        held = all(
            sum(n * kind.memory_bytes for n, kind in zip(group, kinds, strict=True)) >= model_bytes
            and sum(group) <= most
            for group in each
        )
        if each and held and (groups is None or len(each) == groups):
            best = max(best, len(each) * min(power_of(group, kinds, micro_batches) for group in each))
    return best


@examples(ordinary=40, thorough=150)
@given(
    counts=st.sampled_from([(6,), (3, 3), (5, 2), (1, 4), (2, 2, 2), (3, 1, 2)]),
    powers=st.lists(st.sampled_from([0.05, 0.3, 1.0, 1.7, 2.0, 6.3]), min_size=3, max_size=3),
    memory=st.lists(st.sampled_from([1.0, 2.0, 3.5]), min_size=3, max_size=3),
    model_bytes=st.sampled_from([0.5, 2.0, 4.0, 7.0, 30.0]),
    micro_batches=st.sampled_from([1, 2, 4, 16]),
    most=st.sampled_from([2, 4, 6]),
    groups=st.sampled_from([None, 1, 2, 3]),
)
def test_as_good_as_exhaustive_search(counts, powers, memory, most, groups, **given):
    kinds = [MemberKind(*each) for each in zip(powers, memory, counts, strict=False)]
    model_bytes, micro_batches = given["model_bytes"], given["micro_batches"]
    found = find_grouping(kinds, model_bytes, micro_batches, max_members=most, groups=groups)
    best = exhaustive(kinds, model_bytes, micro_batches, most, groups)
    assert (found.objective if found else 0.0) == pytest.approx(best, rel=1e-8)
    if found is None:
        return
    used = np.array(found.groups).sum(axis=0)
    assert (used == counts).all()
    for group in found.groups:
        assert 1 <= sum(group) <= most
        assert np.dot(group, [kind.memory_bytes for kind in kinds]) >= model_bytes
        assert power_of(group, kinds, micro_batches) >= found.power * (1 - 1e-12)


def test_the_example_of_the_paper_and_large_clusters() -> None:
    # AutoHet, section V-A: one A100 and four H20 make two groups, A100 + H20 and three H20.
    found = find_grouping([MemberKind(312.0, 80.0, 1), MemberKind(148.0, 96.0, 4)], 160.0, 16)
    assert found is not None and found.groups == ((1, 1), (0, 3))
    # Equal groups are the optimum, and the search finds them for 1,024 members of three kinds.
    kinds = [MemberKind(312.0, 80.0, 352), MemberKind(990.0, 80.0, 352), MemberKind(148.0, 96.0, 320)]
    found = find_grouping(kinds, 1000.0, 64, groups=32)
    assert found is not None and set(found.groups) == {(11, 11, 10)}
