"""Allocations for models that cannot train with a single sample, compared with all other allocations by enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner import Curve, allocate
from colossal_hetero.planner.batches.allocation import METHODS
from tests.support.random_examples import examples
from tests.unit.planner.batches.test_allocation import check_sound, communications, step_times

Cluster = tuple[list[Curve], int]


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Up to four ranks of up to three kinds, and the smallest micro-batch of the model."""
    smallest = draw(st.integers(2, 4))

    def curve() -> Curve:
        steps = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.7]), min_size=smallest - 1, max_size=smallest + 4))
        first = draw(st.sampled_from([0.1, 1.0, 3.0]))
        return Curve.from_seconds([first + sum(steps[:n]) for n in range(len(steps) + 1)], smallest)

    kinds = [curve() for _ in range(draw(st.integers(1, 3)))]
    return draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4)), smallest


def parts(samples: int, largest: list[int], floor: int) -> Iterator[tuple[int, ...]]:
    """Every division of ``samples`` in which a rank has none, or at least ``floor`` and at most its ``largest``."""
    if not largest:
        if samples == 0:
            yield ()
        return
    for first in [0, *range(floor, min(samples, largest[0]) + 1)]:
        for rest in parts(samples - first, largest[1:], floor):
            yield (first, *rest)


def least_wall(
    curves: list[Curve], smallest: int, samples: int, stage: int, communication: float, steps_of_optimizer: list[float]
) -> float:
    """The shortest wall time of all divisions; infinite if there is none."""
    largest = [curve.max_batch for curve in curves]
    best = inf
    # In stage 0 no collective separates the optimizer's step from the next forward pass.
    inside = steps_of_optimizer if stage == 0 else [0.0] * len(curves)
    outside = 0.0 if stage == 0 else max(steps_of_optimizer)
    if stage < 2:
        for steps in range(1, samples + 1):
            for dealt in parts(samples, [steps * most for most in largest], steps * smallest):
                sizes = [[n // steps + (step < n % steps) for step in range(steps)] for n in dealt]
                busy = (sum(c.seconds[b] for b in of) + own for c, of, own in zip(curves, sizes, inside, strict=True))
                best = min(best, max(busy))
        return best + communication + outside

    def of_step(count: int) -> float:
        walls = (
            max(c.seconds[b] for c, b in zip(curves, dealt, strict=True)) for dealt in parts(count, largest, smallest)
        )
        return min(walls, default=inf) + communication

    for size in range(1, samples + 1):
        full, rest = divmod(samples, size)
        best = min(best, full * of_step(size) + (of_step(rest) if rest else 0.0))
    return best + outside


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@examples(ordinary=60, thorough=300)
@given(clusters(), st.integers(1, 13), communications, st.data())
def test_no_allocation_is_better(
    stage: int, cluster: Cluster, samples: int, communication: float, data: st.DataObject
) -> None:
    curves, smallest = cluster
    step = data.draw(st.lists(step_times, min_size=len(curves), max_size=len(curves)))
    best = least_wall(curves, smallest, samples, stage, communication, step)
    if best == inf:
        with pytest.raises(ValueError, match=r"drop_last|use another global batch size"):
            allocate(curves, samples, stage, communication_seconds=communication, step_seconds=step)
        return
    found = allocate(curves, samples, stage, communication_seconds=communication, step_seconds=step)
    check_sound(found, curves, samples, communication, step)
    assert all(size == 0 or size >= smallest for share in found.shares for size in share.sizes)
    assert found.wall_seconds == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@examples(ordinary=30, thorough=150)
@given(clusters(), st.integers(1, 200), st.data())
def test_the_simple_rules_keep_the_smallest_batch_or_say_why_not(
    stage: int, cluster: Cluster, samples: int, data: st.DataObject
) -> None:
    curves, smallest = cluster
    flops = data.draw(st.lists(st.floats(0.1, 10), min_size=len(curves), max_size=len(curves)))
    walls = {}
    for method in METHODS:
        try:
            allocation = allocate(curves, samples, stage, method=method, flops=flops)
        except ValueError as error:
            assert "the model trains with" in str(error), error
            continue
        check_sound(allocation, curves, samples, 0.0)
        assert all(size == 0 or size >= smallest for share in allocation.shares for size in share.sizes)
        walls[method] = allocation.wall_seconds
    if walls:
        assert walls["exact"] <= min(walls.values()) * (1 + 1e-9)


def test_own_numbers_of_micro_batches_are_refused() -> None:
    curves = [Curve.from_seconds([1.0, 2.0, 3.0], 2)] * 2
    with pytest.raises(ValueError, match="accumulation='per_rank' is not possible"):
        allocate(curves, 8, 0, accumulation="per_rank")
