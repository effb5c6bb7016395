"""Times of gradients of pipelines that are cut differently: by hand, and of the buckets that the plugin sums."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from colossal_hetero.planner.cluster.all_reduce import concurrent_seconds
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.gradient_times import GradientTimes, Summing
from colossal_hetero.planner.cost.placement import NodeLinks
from colossal_hetero.plugin.replicas.replica_gradients import HeldParameter, divide_into_buckets
from tests.support.random_clusters import random_cluster


@pytest.mark.parametrize("shared", [math.inf, 8e9])
def test_rings_of_unequal_cuts_share_the_bus_of_a_node(shared: float) -> None:
    """Two pipelines in a node are cut behind the first and behind the second block. Rings of two devices have two
    messages inside the node at a time, and as many rings as pipelines have stages run at once: four messages."""
    kind = DeviceKind("gpu", 10**10, 1e12)
    node = Node("n", 0, (0, 1, 2, 3), Channel("PCIe", 16e9), (), shared)
    topology = Topology((Device(kind, 0, 0),) * 4, (node,), ("here",))
    summing = Summing(GradientTimes(topology), np.array([0]), [[(0,), (1,)], [(2,), (3,)]], np.full(4, 1e9))
    found = summing.seconds([(0, 1, 4), (0, 2, 4)])
    # Rank 1 holds three blocks; in a ring of two, each device sends the bytes of its gradients once.
    assert found == pytest.approx(3e9 / min(16e9, shared / 4))


def test_each_layer_is_summed_by_the_ranks_that_hold_it() -> None:
    """Replicas of 1, 2 and 3 stages on six nodes: the same groups, bytes and networks as the plugin's buckets have."""
    blocks, elements = 6, 10**8
    rates = [1e9, 4e9, 2e9, 8e9, 1e9, 4e9]
    kind = DeviceKind("gpu", 10**10, 1e12)
    inside = Channel("PCIe", 16e9)
    nodes = [Node(f"n{at}", 0, (at,), inside, (Channel("Ethernet", rate),)) for at, rate in enumerate(rates)]
    topology = Topology(tuple(Device(kind, at, 0) for at in range(6)), tuple(nodes), ("here",))
    cuts = [((0,), (0, 6)), ((1, 2), (0, 4, 6)), ((3, 4, 5), (0, 1, 3, 6))]
    held = {
        rank: [HeldParameter(f"block {block}", elements, "fp32") for block in range(start, stop)]
        for ranks, cut in cuts
        for rank, start, stop in zip(ranks, cut[:-1], cut[1:], strict=True)
    }
    buckets = divide_into_buckets([f"block {block}" for block in range(blocks)], held, 2 * elements)
    # A ring of three sends 4/3 of the bytes from each rank, all at the pace of the slowest card. A rank sums its
    # buckets one after the other.
    spent = dict.fromkeys(range(6), 0.0)
    for bucket in buckets:
        size = 4 * elements * len(bucket.names)
        for rank in bucket.ranks:
            spent[rank] += 2 * 2 / 3 * size / min(rates[each] for each in bucket.ranks)
    groups = [[(rank,) for rank in ranks] for ranks, _ in cuts]
    summing = Summing(GradientTimes(topology), np.arange(6), groups, np.full(blocks, 4.0 * elements))
    found = summing.seconds([cut for _, cut in cuts])
    assert {bucket.ranks for bucket in buckets} == {(0, 1, 3), (0, 1, 4), (0, 1, 5), (0, 2, 5)}
    assert found == pytest.approx(max(spent.values()))


@pytest.mark.parametrize("seed", range(6))
def test_what_is_looked_up_is_what_rings_take(seed: int) -> None:
    """Many arrangements of equal pipelines, priced one after the other, take what each takes on its own."""
    random = np.random.default_rng(seed)
    topology = random_cluster(random, 16)
    links = NodeLinks(topology, 1e6)
    times = GradientTimes(topology)
    sizes = random.choice([0.0, 1e6, 3e8], 4)
    for _ in range(60):
        width = 2 if random.random() < 0.3 else 1
        # Slots are neighboring devices of a node.
        slots = [
            node.devices[first : first + width]
            for node in topology.nodes
            for first in range(0, len(node.devices) - width + 1, width)
        ]
        pipelines = int(random.integers(2, 4))
        stages = int(random.integers(1, 4))
        if len(slots) < pipelines * stages:
            continue
        chosen = [slots[slot] for slot in random.permutation(len(slots))[: pipelines * stages]]
        groups = [chosen[first * stages : (first + 1) * stages] for first in range(pipelines)]
        bounds = (0, *sorted(random.choice([1, 2, 3], stages - 1, replace=False).tolist()), 4)
        rings = [list(zip(*members, strict=True)) for members in zip(*groups, strict=True)]
        bytes_of = [float(sizes[start:stop].sum()) for start, stop in itertools.pairwise(bounds)]
        expected = concurrent_seconds(
            topology,
            [ring for stage in rings for ring in stage],
            [size for size, stage in zip(bytes_of, rings, strict=True) for _ in stage],
        )
        found = Summing(times, links.node_kind, groups, sizes).seconds([bounds] * pipelines)
        assert found == pytest.approx(max(expected), rel=1e-12)
