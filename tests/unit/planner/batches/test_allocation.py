"""Batch profiles, curves, and allocations against all others; ADAPT's rings, dropped devices and links."""

import json
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import combinations, permutations
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner import Allocation, Curve, allocate
from colossal_hetero.planner.batches import adapt as adapt_module
from colossal_hetero.planner.batches.adapt import (
    EXACT_DEVICES,
    AdaptPlan,
    RingNetwork,
    ring_cost,
    ring_order,
    with_cluster_links,
)
from colossal_hetero.planner.batches.allocation import METHODS, largest_remainders
from colossal_hetero.planner.batches.batch_profile import load_profile, save_profile
from colossal_hetero.planner.batches.time_curve import MAX_DIP, equal_devices, joint_curves
from colossal_hetero.planner.cluster.cluster_file import save_cluster
from colossal_hetero.planner.cluster.gpu_catalog import GPUS
from colossal_hetero.planner.cluster.topology import Channel, DeviceKind, MeasuredLink
from colossal_hetero.planner.report.batch_report import compare
from tests.support.batch_profiles import GIB, device, profile
from tests.support.command_line import failure, run
from tests.support.machines import of_nodes
from tests.support.random_examples import examples


def test_a_saved_profile_loads_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(profile(), path)
    assert load_profile(path) == profile()
    assert list(tmp_path.iterdir()) == [path]
    text = path.read_text()
    assert json.loads(text)["schema"] == 1
    assert '{ "batch": 1, "seconds": 0.1 }' in text  # one line per point, easy to edit


def test_curves_communication_and_flops_of_a_profile() -> None:
    curves = profile().curves(0)
    assert curves[0] is curves[2] and curves[1] is curves[3] and curves[0] is not curves[1]
    assert [curve.max_batch for curve in curves] == [4, 2, 4, 2]
    assert [curve.max_batch for curve in profile().curves(0, largest=3)] == [3, 2, 3, 2]
    assert [profile().communication(stage) for stage in range(4)] == [0.5, 0.25, 0.25, 0.75]
    assert profile(stage=2).communication(2) == 0.5
    assert profile().flops == [1e12] * 4
    assert profile(kinds=[device(), device("slow", flops=None)]).flops is None
    points = [{"batch": 4, "seconds": 0.3}, {"batch": 1, "seconds": 0.1}]
    assert [point.batch for point in device(points=points).points] == [1, 4]


def test_a_device_without_enough_memory_may_hold_a_sample_at_the_next_stage() -> None:
    small = device("small", max_batch=0, memory_bytes=10 * GIB)
    one = profile(kinds=[device(), small], ranks=[0, 1, 1, 1], links=[])
    assert [one.kind_max_batches(stage)[1] for stage in range(4)] == [0, 1, 2, 3]
    assert one.curves(1)[1].max_batch == 1


@st.composite
def measured(draw: st.DrawFn) -> tuple[dict[int, float], int]:
    batches = sorted(draw(st.sets(st.integers(1, 64), min_size=2, max_size=8)))
    times, time = [], draw(st.floats(0.001, 1.0))
    for _ in batches:
        times.append(time * draw(st.floats(1 - MAX_DIP / 2.1, 1.0)))
        time += draw(st.floats(0.0, 1.0))
    return dict(zip(batches, times, strict=True)), draw(st.integers(1, 100))


def test_curves_by_hand() -> None:
    points = {1: 1.0, 2: 1.1, 4: 1.9, 8: 4.5, 13: 6.0}
    curve = Curve.through(points, 20)
    assert {batch: curve.seconds[batch] for batch in points} == pytest.approx(points)
    # After the last point the curve is linear.
    assert np.diff(curve.seconds[13:], 2) == pytest.approx(np.zeros(6), abs=1e-12)
    # The natural spline: its second derivative is 18/8 at 4, and 0 at 2 and 6.
    curve = Curve.through({2: 1.0, 4: 2.0, 6: 9.0}, 6)
    assert curve.seconds[5] == pytest.approx(18 / 8 / 12 + (2 / 2 - 18 / 8 / 3) + 9 / 2)
    # Between two points it stays between their times, and below the first one no sample is faster than there.
    curve = Curve.through({1: 1.0, 8: 1.0, 9: 5.0, 16: 5.0}, 16)
    assert curve.seconds[1:9].tolist() == [1.0] * 8 and curve.seconds[9:].tolist() == [5.0] * 8
    assert (Curve.through({4: 2.0, 8: 6.0}, 8).seconds[1:4] >= 2.0 * np.arange(1, 4) / 4 - 1e-12).all()
    assert Curve.through({1: 0.5}, 1).seconds.tolist() == [0.5, 0.5]
    curve = Curve.from_seconds([2.0, 2.0, 4.5, 5.0])
    assert curve.peak_speed == 1.0 and curve.limited(0).peak_speed == 0.0
    assert curve.limited(9) is curve and curve.limited(2).max_batch == 2 and curve.limited(0).max_batch == 0
    assert not curve.seconds.flags.writeable
    # Noise is averaged.
    curve = Curve.through({1: 1.0, 2: 2.0, 4: 1.9, 8: 4.0}, 8)
    assert curve.seconds[[2, 3, 4]].tolist() == pytest.approx([1.95] * 3)


def test_below_the_smallest_batch_the_curve_is_level() -> None:
    points = {2: 1.0, 4: 2.0, 6: 9.0}
    curve, whole = Curve.through(points, 6, min_batch=2), Curve.through(points, 6)
    assert curve.seconds.tolist() == [1.0, 1.0, 1.0, *whole.seconds[3:]]
    assert curve.limited(3).min_batch == 2 and curve.limited(1).max_batch == 0
    assert Curve.through({2: 1.0}, 2, min_batch=2).seconds.tolist() == [1.0] * 3
    assert Curve.from_seconds([1.0, 2.0, 3.0], 3).seconds.tolist() == [3.0] * 4


def device_curve(factor: float, max_batch: int = 64, min_batch: int = 1) -> Curve:
    return Curve.from_seconds(factor * (0.2 + 0.1 * np.arange(1, max_batch + 1)), min_batch)


def test_each_device_keeps_its_largest_micro_batch() -> None:
    curves = [device_curve(1.0, 64, 2), device_curve(1.03, 40, 2), device_curve(1.04, 64, 2)]
    joint = joint_curves(curves, equal_devices(["gpu"] * 3, curves))
    assert [(each.min_batch, each.max_batch) for each in joint] == [(2, 64), (2, 40), (2, 64)]
    np.testing.assert_array_equal(joint[0].seconds[:41], joint[1].seconds)
    # The shorter curve was slower. Where it ends, the joint one does not become faster.
    np.testing.assert_allclose(joint[0].seconds, device_curve(np.mean([1.0, 1.03, 1.04]), 64, 2).seconds)


def test_a_profile_of_fewer_ranks_in_another_order() -> None:
    """At stage 1, each of two ranks keeps and steps half of the optimizer's state instead of a quarter."""
    made = profile(stage=1, kinds=[device(step_seconds=0.1), device("slow", step_seconds=0.2)])
    fewer = made.of_ranks((1, 0), 0.25)
    assert (fewer.devices, fewer.communication_seconds) == (["slow", "fast"], 0.25)
    assert fewer.step_seconds(1) == pytest.approx([0.4, 0.2]) == [2 * each for each in made.step_seconds(1)[1::-1]]
    assert [kind.state_bytes - 16 * GIB for kind in fewer.kinds] == [3 * GIB] * 2
    assert [kind.max_batch for kind in fewer.kinds] == made.kind_max_batches(1, sharing_ranks=2)
    assert [link.ranks for link in fewer.links] == [(1, 0)] and not made.of_ranks((0, 2), 0.0).links
    assert made.of_ranks(range(4), made.communication_seconds) == made


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


def least_wall(curves, samples, stage, accumulation, communication, steps, number=None) -> float:
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
def test_no_allocation_is_better(stage, accumulation, smallest, data, samples, communication):
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
def test_exact_is_never_slower_than_the_simple_rules(stage, accumulation, data, samples, communication, smallest):
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


def test_the_flops_method_divides_in_proportion_to_flops() -> None:
    curve = Curve.from_seconds([1.0 * b for b in range(1, 9)])
    found = allocate([curve] * 2, 12, 0, method="flops", flops=[2e12, 1e12])
    assert [share.runs for share in found.shares] == [((8, 1),), ((4, 1),)]
    found = allocate([curve] * 2, 24, 2, method="flops", flops=[2e12, 1e12])
    assert [share.sizes for share in found.shares] == [(8, 8), (4, 4)]
    assert list(largest_remainders([1, 1, 1], 5)) == [2, 2, 1]


GPU, CPU = ("nccl", "gloo"), ("gloo",)


def link(ranks: tuple[int, int], protocol: str, latency: float, bytes_per_second: float = 1e30) -> MeasuredLink:
    return MeasuredLink(ranks=ranks, protocol=protocol, latency_seconds=latency, bytes_per_second=bytes_per_second)


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    count = draw(st.integers(1, 7))
    edge = draw(st.sampled_from([st.floats(0.01, 10), st.integers(1, 4).map(float)]))
    seconds = np.array(draw(st.lists(edge, min_size=count * count, max_size=count * count))).reshape(count, count)
    return np.minimum(seconds, seconds.T) if draw(st.booleans()) else seconds


@examples(ordinary=50, thorough=300)
@given(matrices())
def test_no_ring_is_better(seconds: np.ndarray) -> None:
    count = len(seconds)
    ring = ring_order(seconds)
    assert ring[0] == 0 and sorted(ring) == list(range(count))
    every = [(0, *rest) for rest in permutations(range(1, count))]
    longest = min(ring_cost(seconds, each)[0] for each in every)
    assert ring_cost(seconds, ring)[0] == longest
    total = min(ring_cost(seconds, each)[1] for each in every if ring_cost(seconds, each)[0] == longest)
    assert ring_cost(seconds, ring)[1] == pytest.approx(total)


@pytest.mark.parametrize("count", [EXACT_DEVICES + 1, 40])
def test_a_hidden_ring_is_found(count: int) -> None:
    """One ring has short edges and all other edges are long. There are too many devices to try all permutations."""
    random = np.random.default_rng(count)
    hidden = random.permutation(count)
    seconds = random.uniform(2.0, 3.0, (count, count))
    seconds[hidden, np.roll(hidden, -1)] = random.uniform(0.5, 1.0, count)
    ring = ring_order(np.minimum(seconds, seconds.T))
    assert ring_cost(np.minimum(seconds, seconds.T), ring)[0] <= 1.0
    assert sorted(ring) == list(range(count)) and ring[0] == 0


def adapt(curves: list[Curve], samples: int, stage: int, **network: Any) -> AdaptPlan:
    return adapt_module.adapt(lambda ranks: curves, samples, stage, RingNetwork(**{"message_bytes": 0, **network}))


def straight(seconds: float, most: int = 16) -> Curve:
    return Curve.from_seconds([seconds * b for b in range(1, most + 1)])


def mesh(count: int, gloo: float, nccl: float | None = None, only: tuple[int, ...] = ()) -> list[MeasuredLink]:
    """Links that take ``gloo`` or ``nccl`` seconds for any message; ``only`` limits the NCCL links to some devices."""
    found = [link(pair, "gloo", gloo) for pair in combinations(range(count), 2)]
    if nccl is not None:
        found += [link(pair, "nccl", nccl) for pair in combinations(only or range(count), 2)]
    return found


def test_two_cpus_are_dropped_together() -> None:
    """If only one of them is dropped, the others still use Gloo and compute longer."""
    curves = [straight(1.0), straight(1.0), straight(2.0), straight(2.0)]
    links = mesh(4, 3.0, 0.1, only=(0, 1))
    plan = adapt(curves, 12, 0, links=links, protocols=[GPU, GPU, CPU, CPU])
    assert plan.dropped == (2, 3) and plan.protocol == "nccl" and plan.cost_seconds == pytest.approx(6.1)
    assert any("use nccl instead of gloo" in step.reason and step.kept for step in plan.steps)


def test_one_device_may_remain_and_one_that_holds_nothing_is_dropped_first() -> None:
    plan = adapt([straight(1.0), straight(50.0)], 4, 2, links=mesh(2, 9.0), protocols=[CPU] * 2)
    assert plan.ring == (0,) and plan.dropped == (1,) and plan.cost_seconds == 4.0
    alone = adapt([straight(1.0)], 4, 2, links=[], protocols=[CPU])
    assert alone.ring == (0,) and alone.cost_seconds == 4.0 and len(alone.steps) == 1
    curves = [straight(1.0), straight(1.0).limited(0), straight(1.0)]
    plan = adapt(curves, 4, 0, links=mesh(3, 0.1), protocols=[CPU] * 3)
    assert plan.dropped == (1,) and plan.steps[0].reason == "cannot hold one sample: rank 1"


@examples(ordinary=25, thorough=60)
@given(
    st.lists(st.tuples(st.floats(0.1, 5), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 12),
    st.sampled_from([0, 3]),
    st.floats(0, 10),
    st.floats(0.01, 1),
    st.randoms(use_true_random=False),
)
def test_costs_are_those_of_the_best_ring_and_batches(devices, samples, stage, gloo, faster, random):
    """The cost is that of the best ring among all permutations of the kept devices. It is at most the cost of all
    devices and at least the cost of the best subset."""
    curves = [straight(seconds, 6) for seconds, _ in devices]
    protocols = [GPU if is_gpu else CPU for _, is_gpu in devices]
    hop = {pair: gloo * random.random() for pair in combinations(range(len(devices)), 2)}
    links = [link(p, "gloo", s) for p, s in hop.items()] + [link(p, "nccl", s * faster) for p, s in hop.items()]

    def cost(ranks: tuple[int, ...]) -> float:
        scale = faster if all(protocols[rank] == GPU for rank in ranks) else 1.0
        edge = min(
            max((scale * hop[min(a, b), max(a, b)] for a, b in zip(r, r[1:] + r[:1], strict=True) if a != b), default=0)
            for r in permutations(ranks)
        )
        return allocate([curves[rank] for rank in ranks], samples, stage, communication_seconds=edge).wall_seconds

    everyone = tuple(range(len(devices)))
    plan = adapt(curves, samples, stage, links=links, protocols=protocols)
    assert plan.cost_seconds == pytest.approx(cost(tuple(sorted(plan.ring))))
    assert sorted(plan.ring + plan.dropped) == list(everyone)
    assert plan.cost_seconds <= plan.steps[0].cost_seconds == pytest.approx(cost(everyone))
    subsets = [each for count in range(1, len(everyone) + 1) for each in combinations(everyone, count)]
    assert plan.cost_seconds >= min(map(cost, subsets)) * (1 - 1e-9)
    kept = [step.cost_seconds for step in plan.steps if step.kept]
    assert kept == sorted(kept, reverse=True) and kept[-1] == plan.cost_seconds


def nics(**rates: float) -> tuple[Channel, ...]:
    return tuple(Channel(kind, rate, 2e-6 if kind == "InfiniBand" else 3e-5) for kind, rate in rates.items())


TOPOLOGY = of_nodes(
    [
        ([GPUS["A100-40"]] * 2, Channel("NVLink", 3e11, 5e-6), nics(InfiniBand=2e10, Ethernet=3e9)),
        ([GPUS["V100-16"]], Channel("NVLink", 1.5e11), nics(InfiniBand=1e10, Ethernet=1e9)),
        ([DeviceKind("host", 10**11, 1e12)], Channel("local", 9e9), nics(Ethernet=2e9)),
    ]
)


def four_devices(**changes: object):
    kinds = [device("A100", protocols=GPU), device("V100", protocols=GPU), device("cpu", protocols=CPU)]
    return profile(**{"kinds": kinds, "ranks": [0, 0, 1, 2], "links": (), **changes})


def test_each_pair_has_a_link_in_each_common_protocol() -> None:
    links = with_cluster_links(four_devices(), TOPOLOGY).links
    found = {(*link.ranks, link.protocol): (link.bytes_per_second, link.latency_seconds) for link in links}
    ethernet = pytest.approx(30e-6)
    assert found == {
        (0, 1, "nccl"): (3e11, pytest.approx(5e-6)),
        (0, 1, "gloo"): (3e11, pytest.approx(5e-6)),
        (0, 2, "nccl"): (1e10, pytest.approx(2e-6)),
        (1, 2, "nccl"): (1e10, pytest.approx(2e-6)),
        (0, 2, "gloo"): (1e9, ethernet),
        (1, 2, "gloo"): (1e9, ethernet),
        (0, 3, "gloo"): (2e9, ethernet),
        (1, 3, "gloo"): (2e9, ethernet),
        (2, 3, "gloo"): (1e9, ethernet),
    }


def test_the_command_drops_devices_by_the_links_of_a_cluster_file(tmp_path: Path) -> None:
    """A CPU that makes all use slow Ethernet is dropped; the same profile with these links gives the same."""
    batches, cluster, out = tmp_path / "profile.json", tmp_path / "cluster.toml", tmp_path / "out.json"
    fast = [{"batch": 1, "seconds": 10.0}, {"batch": 4, "seconds": 25.0}]
    slow = [{"batch": 1, "seconds": 900.0}, {"batch": 4, "seconds": 3600.0}]
    kinds = [
        *(device(name, protocols=GPU, points=fast) for name in ("A100", "V100")),
        device("cpu", protocols=CPU, points=slow),
    ]
    save_profile(four_devices(kinds=kinds, communication_seconds=0.0), batches)
    save_cluster(TOPOLOGY, cluster)
    result = run("batches", batches, "--global-batch", 16, "--method", "adapt", "--cluster", cluster, "--out", out)
    assert result.exit_code == 0, result.output
    expected = compare(with_cluster_links(load_profile(batches), TOPOLOGY), 16, method="adapt").adapt
    assert expected is not None and expected.dropped == (3,) and expected.protocol == "nccl"
    assert "dropped" in result.output and '"dropped": [3]' in out.read_text()
    assert "no such file" in failure("batches", batches, "--global-batch", 16, "--cluster", tmp_path / "none.toml")
