"""Allocations compared with all other allocations by enumeration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner import Allocation, Curve, allocate
from colossal_hetero.planner.batches.allocation import METHODS, largest_remainders
from tests.support.random_examples import examples

SETTINGS = [(0, "shared"), (1, "shared"), (2, "shared"), (3, "shared"), (0, "per_rank"), (1, "per_rank")]
FOR_LARGER = [(stage, "shared", 2) for stage in range(4)]
"""For models that train with at least 2 to 4 samples."""
ROUNDING = 1 + 1e-9

step = st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-3, 3.0))
seconds_of = st.lists(step, max_size=6).flatmap(
    lambda steps: st.floats(0.01, 5.0).map(lambda first: [first + sum(steps[:n]) for n in range(len(steps) + 1)])
)
linear = st.builds(lambda slope, most: [slope * b for b in range(1, most + 1)], st.floats(0.05, 3), st.integers(1, 7))
curves_of = st.one_of(seconds_of, linear).map(Curve.from_seconds)
communications = st.one_of(st.just(0.0), st.floats(0.01, 3.0))
step_times = st.one_of(st.just(0.0), st.sampled_from([0.5, 4.0]), st.floats(0.01, 20.0))


@st.composite
def clusters(draw: st.DrawFn, most_kinds: int = 3, most_ranks: int = 4, smallest: int = 1) -> list[Curve]:
    """Ranks of a few kinds, for a model that trains with at least ``smallest`` samples."""

    def curve() -> Curve:
        steps = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.7]), min_size=smallest - 1, max_size=smallest + 4))
        first = draw(st.sampled_from([0.1, 1.0, 3.0]))
        return Curve.from_seconds([first + sum(steps[:n]) for n in range(len(steps) + 1)], smallest)

    kinds = [draw(curves_of) if smallest == 1 else curve() for _ in range(draw(st.integers(1, most_kinds)))]
    return draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=most_ranks))


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
    curves: list[Curve],
    samples: int,
    stage: int,
    accumulation: str,
    communication: float,
    steps: list[float],
    number: int | None = None,
) -> float:
    """The shortest wall time, found by enumeration of all sizes and divisions, and of all numbers of micro-steps unless
    a ``number`` is given; infinite if none is possible."""
    times = [[float(s) for s in curve.seconds] for curve in curves]
    largest = [curve.max_batch for curve in curves]
    smallest = max(curve.min_batch for curve in curves)

    if stage >= 2:

        @lru_cache
        def of_step(count: int) -> float:
            dealt = parts(count, largest, smallest)
            return min((max(t[b] for t, b in zip(times, each, strict=True)) for each in dealt), default=inf)

        best = inf
        for size in range(1, min(samples, sum(largest)) + 1):
            full, rest = divmod(samples, size)
            if number not in (None, full + (rest > 0)):
                continue
            wall = full * (of_step(size) + communication)
            best = min(best, wall + (of_step(rest) + communication if rest else 0.0))
        return best + max(steps)

    def own(t: list[float], n: int) -> float:
        if n == 0:
            return t[0]
        return min(n // b * t[b] + (t[n % b] if n % b else 0.0) for b in range(1, len(t)))

    def even(t: list[float], n: int, steps: int) -> float:
        sizes = [n // steps + (i < n % steps) for i in range(steps)]
        return sum(t[size] for size in sizes) if sizes[0] < len(t) else inf

    def wall(cost: Callable[[list[float], int], float], floor: int) -> float:
        costs = [[cost(t, n) for n in range(samples + 1)] for t in times]
        # In stage 0 no collective separates the optimizer's step from the next forward pass.
        inside = steps if stage == 0 else [0.0] * len(curves)
        dealt = parts(samples, [samples] * len(curves), floor)
        return min((max(costs[r][n] + inside[r] for r, n in enumerate(each)) for each in dealt), default=inf)

    outside = communication + (0.0 if stage == 0 else max(steps))
    if accumulation == "per_rank":
        return wall(own, 1) + outside
    counts = range(1, samples + 2) if number is None else [number]
    floors = [count * smallest if smallest > 1 else 1 for count in counts]
    return min(wall(partial(even, steps=n), floor) for n, floor in zip(counts, floors, strict=True)) + outside


def check_sound(
    allocation: Allocation, curves: list[Curve], samples: int, communication: float, step: list[float] | None = None
) -> None:
    """Check that every sample is allocated once, no micro-batch is too large, and the times are those of the curves."""
    shares, fixed = allocation.shares, step or [0.0] * len(curves)
    assert sum(share.samples for share in shares) == samples == allocation.global_batch_size
    smallest = max(curve.min_batch for curve in curves)
    assert all(size == 0 or size >= smallest for share in shares for size in share.sizes)
    for curve, share, busy, own in zip(curves, shares, allocation.busy_seconds, fixed, strict=True):
        assert 0 <= share.micro_batch <= curve.max_batch
        assert all(count > 0 for _, count in share.runs)
        assert share.sizes[-1] == share.last_batch and len(share.sizes) == share.steps
        assert busy == pytest.approx(sum(curve.seconds[size] for size in share.sizes) + own)
    if allocation.accumulation == "shared":
        assert len({share.steps for share in shares}) == 1
    if allocation.stage < 2:
        assert allocation.communication_seconds == communication
        if allocation.stage == 0:
            compute = max(allocation.busy_seconds)
        else:
            alone = (busy - own for busy, own in zip(allocation.busy_seconds, fixed, strict=True))
            compute = max(alone) + max(fixed)
    else:
        assert allocation.communication_seconds == pytest.approx(allocation.steps * communication)
        steps = zip(*(share.sizes for share in shares), strict=True)
        compute = sum(max(c.seconds[b] for c, b in zip(curves, dealt, strict=True)) for dealt in steps) + max(fixed)
    assert allocation.wall_seconds == pytest.approx(compute + allocation.communication_seconds)
    assert allocation.samples_per_second == pytest.approx(samples / allocation.wall_seconds)
    assert min(allocation.idle_seconds) >= 0


@pytest.mark.parametrize("stage, accumulation, smallest", [*((*each, 1) for each in SETTINGS), *FOR_LARGER])
@examples(ordinary=25, thorough=200)
@given(st.data(), st.integers(1, 12), communications)
def test_no_allocation_is_better(
    stage: int, accumulation: str, smallest: int, data: st.DataObject, samples: int, communication: float
) -> None:
    curves = data.draw(clusters(smallest=data.draw(st.integers(smallest, 4)) if smallest > 1 else 1))
    step = data.draw(st.lists(step_times, min_size=len(curves), max_size=len(curves)))
    options = {"accumulation": accumulation, "communication_seconds": communication, "step_seconds": step}
    best = least_wall(curves, samples, stage, accumulation, communication, step)
    if best == inf:
        with pytest.raises(ValueError, match=r"drop_last|use another global batch size"):
            allocate(curves, samples, stage, **options)
        return
    found = allocate(curves, samples, stage, **options)
    check_sound(found, curves, samples, communication, step)
    assert found.wall_seconds == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("stage, accumulation", SETTINGS)
@examples(ordinary=12, thorough=180)
@given(st.data(), st.integers(1, 300), communications, st.integers(1, 3))
def test_exact_is_never_slower_than_the_simple_rules(
    stage: int, accumulation: str, data: st.DataObject, samples: int, communication: float, smallest: int
) -> None:
    """Rules that cannot keep the smallest micro-batch say so."""
    curves = data.draw(clusters(4, 12, smallest))
    flops = data.draw(st.lists(st.floats(0.1, 10), min_size=len(curves), max_size=len(curves)))
    walls = {}
    for method in METHODS:
        options = {"method": method, "accumulation": accumulation, "communication_seconds": communication}
        if method == "poplar" and stage < 2 and accumulation == "shared":
            continue  # its form is per_rank
        try:
            allocation = allocate(curves, samples, stage, flops=flops, **options)
        except ValueError as error:
            assert (smallest > 1 and "the model trains with" in str(error)) or "a model that trains" in str(error)
            continue
        assert allocation.method == method
        check_sound(allocation, curves, samples, communication)
        walls[method] = allocation.wall_seconds
    compared = set(METHODS) - ({"poplar"} if stage < 2 and accumulation == "shared" else set())
    assert set(walls) == compared if smallest == 1 else "exact" in walls or not walls
    assert not walls or walls["exact"] <= min(walls.values()) * ROUNDING


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@examples(ordinary=20, thorough=200)
@given(st.data(), st.integers(1, 12), st.sampled_from([0.02, 0.2]))
def test_more_micro_steps_must_save_time(stage: int, data: st.DataObject, samples: int, gain: float) -> None:
    curves = data.draw(clusters())
    no_step = [0.0] * len(curves)
    walls = [least_wall(curves, samples, stage, "shared", 0.0, no_step, number) for number in range(1, samples + 1)]
    fewest = next(number for number, wall in enumerate(walls, 1) if wall <= min(walls) * (1 + gain) * ROUNDING)
    found = allocate(curves, samples, stage, least_gain=gain)
    check_sound(found, curves, samples, 0.0)
    assert (found.steps, found.wall_seconds) == (fewest, pytest.approx(walls[fewest - 1], rel=1e-9))


def test_poplar_as_printed() -> None:
    """Peaks of 4 and 2 samples per second: t = 11/6 s, so 7 and 3 samples, and one more to rank 1, which has 1.5 s."""
    fast, slow = Curve.from_seconds([0.5, 0.6, 0.75]), Curve.from_seconds([0.6, 1.0, 1.6])
    found = allocate([fast, slow], 11, 0, method="poplar", accumulation="per_rank")
    assert [share.runs for share in found.shares] == [((3, 2), (1, 1)), ((2, 2),)]
    assert found.wall_seconds == pytest.approx(2.0)
    exact = allocate([fast, slow], 11, 0, accumulation="per_rank").wall_seconds
    assert exact <= found.wall_seconds
    # t = 0.75: 3 + 1 samples, 3 micro-steps of 0.75 + 0.25 s; t = 1.0: 3 + 2 in 3 of 1.25 s; t = 0.6: 2 + 1 in 4.
    found = allocate([fast, slow], 11, 2, method="poplar", communication_seconds=0.25)
    assert [share.sizes for share in found.shares] == [(3, 3, 2), (1, 1, 1)]
    with pytest.raises(ValueError, match="use accumulation='per_rank', or stage 2 or 3"):
        allocate([fast, slow], 11, 1, method="poplar")


def test_the_flops_method_divides_in_proportion_to_flops() -> None:
    curve = Curve.from_seconds([1.0 * b for b in range(1, 9)])
    found = allocate([curve] * 2, 12, 0, method="flops", flops=[2e12, 1e12])
    assert [share.runs for share in found.shares] == [((8, 1),), ((4, 1),)]
    found = allocate([curve] * 2, 24, 2, method="flops", flops=[2e12, 1e12])
    assert [share.sizes for share in found.shares] == [(8, 8), (4, 4)]
    assert list(largest_remainders([1, 1, 1], 5)) == [2, 2, 1]
