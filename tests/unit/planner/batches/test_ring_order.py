"""Ring orders compared with all permutations."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner.batches.ring_order import (
    EXACT_DEVICES,
    RingNetwork,
    _local_search,
    ring_cost,
    ring_order,
)
from colossal_hetero.planner.cluster.topology import MeasuredLink
from tests.support.random_examples import examples


def link(ranks: tuple[int, int], latency: float, bytes_per_second: float, protocol: str = "gloo") -> MeasuredLink:
    return MeasuredLink(ranks=ranks, protocol=protocol, latency_seconds=latency, bytes_per_second=bytes_per_second)


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    """Matrices of directed edges, often with equal values."""
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


def test_the_longest_edge_counts_more_than_the_total() -> None:
    """The ring 0-1-2-3 has a total of 8, but one edge of 5."""
    seconds = np.full((4, 4), 3.0)
    for a, b in ((0, 1), (1, 2), (2, 3)):
        seconds[a, b] = seconds[b, a] = 1.0
    seconds[0, 3] = seconds[3, 0] = 5.0
    assert ring_cost(seconds, ring_order(seconds))[0] == 3.0


@pytest.mark.parametrize("count", [EXACT_DEVICES, EXACT_DEVICES + 1, 20, 40])
def test_a_hidden_ring_is_found(count: int) -> None:
    """One ring has short edges and all other edges are long. There are too many devices to try all permutations."""
    random = np.random.default_rng(count)
    hidden = random.permutation(count)
    seconds = random.uniform(2.0, 3.0, (count, count))
    seconds[hidden, np.roll(hidden, -1)] = random.uniform(0.5, 1.0, count)
    seconds = np.minimum(seconds, seconds.T)
    assert ring_cost(seconds, ring_order(seconds))[0] <= 1.0


def test_the_local_search_is_close_to_the_optimum() -> None:
    """With so few devices, the exact search is possible, too."""
    ratios = []
    for seed in range(20):
        seconds = np.random.default_rng(seed).uniform(0.1, 1.0, (9, 9))
        ratios.append(ring_cost(seconds, _local_search(seconds))[0] / ring_cost(seconds, ring_order(seconds))[0])
    assert min(ratios) >= 1.0 and np.mean(ratios) < 1.15


@examples(ordinary=5, thorough=10)
@given(st.integers(13, 18), st.integers(0, 2**32 - 1))
def test_the_ring_of_many_devices_is_no_worse_than_their_numbering(count: int, seed: int) -> None:
    seconds = np.random.default_rng(seed).uniform(0.1, 1.0, (count, count))
    ring = ring_order(seconds)
    assert sorted(ring) == list(range(count)) and ring[0] == 0
    assert ring_cost(seconds, ring)[0] <= ring_cost(seconds, range(count))[0]
    assert ring == ring_order(seconds)


def test_only_links_of_the_protocol_are_used() -> None:
    links = [
        link((0, 2), 1.0, 10.0),
        link((2, 5), 2.0, 10.0),
        link((5, 2), 3.0, 10.0),
        link((0, 5), 0.0, 100.0),
        link((0, 2), 0.1, 1000.0, "nccl"),
    ]
    gloo, nccl = (RingNetwork(links, [[protocol]] * 6, 100.0) for protocol in ("gloo", "nccl"))
    np.testing.assert_allclose(gloo.seconds([0, 2, 5]), [[0, 11, 1], [11, 0, 12], [1, 13, 0]])
    assert nccl.seconds([2, 0])[0, 1] == pytest.approx(0.2)
    with pytest.raises(ValueError, match="no nccl link between ranks 0 and 5; measure"):
        nccl.seconds([0, 2, 5])
    for latency, bandwidth, field in ((0.0, 0.0, "bytes_per_second"), (-1.0, 1.0, "latency"), (np.inf, 1.0, "latency")):
        with pytest.raises(ValueError, match=field):
            link((0, 1), latency, bandwidth)


def test_one_cpu_makes_all_devices_use_gloo() -> None:
    network = RingNetwork([], [("nccl", "gloo"), ("nccl", "gloo"), ("gloo",), ("nccl",)], 0.0)
    assert network.protocol([0, 1]) == "nccl"
    assert network.protocol([0, 1, 2]) == "gloo"
    with pytest.raises(ValueError, match="no protocol of nccl, gloo is supported by all devices"):
        network.protocol([2, 3])
