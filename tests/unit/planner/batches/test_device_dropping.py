"""Which devices are dropped, and how much time that saves."""

from __future__ import annotations

from itertools import combinations, permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner import Curve, Share, allocate
from colossal_hetero.planner.batches import comparison
from colossal_hetero.planner.batches.ring_order import RingNetwork
from colossal_hetero.planner.cluster.topology import MeasuredLink
from tests.support.random_examples import examples

GPU, CPU = ("nccl", "gloo"), ("gloo",)


def adapt(curves: list[Curve], samples: int, stage: int, **network: Any) -> comparison.AdaptPlan:
    return comparison.adapt(lambda ranks: curves, samples, stage, RingNetwork(**network))


def straight(seconds: float, most: int = 16) -> Curve:
    return Curve.from_seconds([seconds * b for b in range(1, most + 1)])


def link(ranks: tuple[int, int], protocol: str, latency: float, bytes_per_second: float) -> MeasuredLink:
    return MeasuredLink(ranks=ranks, protocol=protocol, latency_seconds=latency, bytes_per_second=bytes_per_second)


def mesh(count: int, gloo: float, nccl: float | None = None, only: tuple[int, ...] = ()) -> list[MeasuredLink]:
    """Links that take ``gloo`` or ``nccl`` seconds for any message; ``only`` limits the NCCL links to some devices."""
    found = [link(pair, "gloo", gloo, 1e30) for pair in combinations(range(count), 2)]
    if nccl is not None:
        found += [link(pair, "nccl", nccl, 1e30) for pair in combinations(only or range(count), 2)]
    return found


def test_equal_devices_are_all_kept() -> None:
    plan = adapt([straight(1.0)] * 4, 32, 0, links=mesh(4, 1.0, 0.1), protocols=[GPU] * 4, message_bytes=0)
    assert plan.dropped == () and plan.protocol == "nccl" and sorted(plan.ring) == [0, 1, 2, 3]
    assert plan.cost_seconds == pytest.approx(8.1) == plan.allocation.wall_seconds
    assert [step.kept for step in plan.steps] == [True, False]
    assert plan.steps[0].reason == "all devices" and plan.steps[1].reason.startswith("rank 0 is the slowest")


def test_a_cpu_that_requires_gloo_is_dropped_if_that_saves_time() -> None:
    curves = [straight(1.0), straight(1.0), straight(4.0)]
    for gloo, dropped in ((10.0, (2,)), (1.0, ())):  # 16 s + gloo with all, 18 s + 0.5 s without the CPU
        links = mesh(3, gloo, 0.5, only=(0, 1))
        plan = adapt(curves, 36, 0, links=links, protocols=[GPU, GPU, CPU], message_bytes=0)
        assert plan.dropped == dropped and plan.protocol == ("nccl" if dropped else "gloo")
        if dropped:
            assert plan.ring == (0, 1) and plan.cost_seconds == pytest.approx(18.5)
            assert plan.allocation.shares[2] == Share(()) and plan.allocation.busy_seconds[2] == 0.0
            assert plan.allocation.shares[2].steps == plan.allocation.shares[2].samples == 0
            assert sum(share.samples for share in plan.allocation.shares) == 36
            assert plan.steps[-2].kept or plan.steps[-1].kept


def test_two_cpus_are_dropped_together() -> None:
    """If only one of them is dropped, the others still use Gloo and compute longer."""
    curves = [straight(1.0), straight(1.0), straight(2.0), straight(2.0)]
    links = mesh(4, 3.0, 0.1, only=(0, 1))
    plan = adapt(curves, 12, 0, links=links, protocols=[GPU, GPU, CPU, CPU], message_bytes=0)
    assert plan.dropped == (2, 3) and plan.protocol == "nccl" and plan.cost_seconds == pytest.approx(6.1)
    assert any("use nccl instead of gloo" in step.reason and step.kept for step in plan.steps)


def test_a_device_behind_a_slow_link_is_dropped() -> None:
    links = [link(pair, "gloo", 5.0 if 1 in pair else 0.1, 1e30) for pair in combinations(range(4), 2)]
    plan = adapt([straight(1.0)] * 4, 12, 0, links=links, protocols=[CPU] * 4, message_bytes=0)
    assert plan.dropped == (1,) and plan.cost_seconds == pytest.approx(4.1)
    assert plan.steps[1].without == (1,) and "communicates longer (5 s) than it computes (3 s)" in plan.steps[1].reason


def test_the_message_size_and_every_micro_step_count() -> None:
    """8 bytes at 4 bytes per second; stage 3 synchronizes in each of the two micro-steps."""
    links = [link((0, 1), "gloo", 1.0, 4.0)]
    arguments = {"links": links, "protocols": [CPU] * 2, "message_bytes": 8.0}
    curves = [straight(100.0, most=2)] * 2
    assert adapt(curves, 8, 0, **arguments).cost_seconds == pytest.approx(400 + 3)
    assert adapt(curves, 8, 3, **arguments).cost_seconds == pytest.approx(400 + 2 * 3)


def test_one_device_may_remain() -> None:
    plan = adapt([straight(1.0), straight(50.0)], 4, 2, links=mesh(2, 9.0), protocols=[CPU] * 2, message_bytes=0)
    assert plan.ring == (0,) and plan.dropped == (1,) and plan.cost_seconds == 4.0
    alone = adapt([straight(1.0)], 4, 2, links=[], protocols=[CPU], message_bytes=0)
    assert alone.ring == (0,) and alone.cost_seconds == 4.0 and len(alone.steps) == 1


def test_a_device_that_cannot_hold_a_sample_is_dropped_first() -> None:
    curves = [straight(1.0), straight(1.0).limited(0), straight(1.0)]
    plan = adapt(curves, 4, 0, links=mesh(3, 0.1), protocols=[CPU] * 3, message_bytes=0)
    assert plan.dropped == (1,) and plan.steps[0].reason == "cannot hold one sample: rank 1"
    with pytest.raises(ValueError, match="none of 1 devices holds one sample in stage 0"):
        adapt(curves[1:2], 4, 0, links=[], protocols=[CPU], message_bytes=0)


def test_missing_links_are_named() -> None:
    with pytest.raises(ValueError, match="no gloo link between ranks 0 and 1"):
        adapt([straight(1.0)] * 2, 4, 0, links=[], protocols=[CPU] * 2, message_bytes=0)


@examples(ordinary=25, thorough=60)
@given(
    st.lists(st.tuples(st.floats(0.1, 5), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 12),
    st.sampled_from([0, 3]),
    st.floats(0, 10),
    st.floats(0.01, 1),
    st.randoms(use_true_random=False),
)
def test_costs_are_those_of_the_best_ring_and_batches(
    devices: list[tuple[float, bool]], samples: int, stage: int, gloo: float, faster: float, random
) -> None:
    """The cost is that of the best ring among all permutations of the kept devices. It is at most the cost of all
    devices and at least the cost of the best subset."""
    curves = [straight(seconds, 6) for seconds, _ in devices]
    protocols = [GPU if is_gpu else CPU for _, is_gpu in devices]
    hop = {pair: gloo * random.random() for pair in combinations(range(len(devices)), 2)}
    links = [link(p, "gloo", s, 1e30) for p, s in hop.items()] + [
        link(p, "nccl", s * faster, 1e30) for p, s in hop.items()
    ]

    def cost(ranks: tuple[int, ...]) -> float:
        scale = faster if all(protocols[rank] == GPU for rank in ranks) else 1.0
        edge = min(
            max((scale * hop[min(a, b), max(a, b)] for a, b in zip(r, r[1:] + r[:1], strict=True) if a != b), default=0)
            for r in permutations(ranks)
        )
        return allocate([curves[rank] for rank in ranks], samples, stage, communication_seconds=edge).wall_seconds

    everyone = tuple(range(len(devices)))
    plan = adapt(curves, samples, stage, links=links, protocols=protocols, message_bytes=0)
    assert plan.cost_seconds == pytest.approx(cost(tuple(sorted(plan.ring))))
    assert sorted(plan.ring + plan.dropped) == list(everyone)
    assert (
        plan.steps[0].cost_seconds == pytest.approx(cost(everyone)) and plan.cost_seconds <= plan.steps[0].cost_seconds
    )
    subsets = [each for count in range(1, len(everyone) + 1) for each in combinations(everyone, count)]
    assert plan.cost_seconds >= min(map(cost, subsets)) * (1 - 1e-9)
    kept = [step.cost_seconds for step in plan.steps if step.kept]
    assert kept == sorted(kept, reverse=True) and kept[-1] == plan.cost_seconds
