"""Sums of gradients of stages of any degrees: those of one degree as before, and others by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.gradient_times import GradientTimes, SummingStage, UnlikeSumming
from colossal_hetero.planner.cost.placement import NodeLinks
from tests.support.random_clusters import random_cluster

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("seed", range(12))
def test_stages_of_one_form_take_what_they_took(seed: int) -> None:
    random = np.random.default_rng(seed)
    topology = random_cluster(random, 16)
    links, times = NodeLinks(topology, 1e6), GradientTimes(topology)
    gradients = random.choice([0.0, 1e6, 3e8], 4)
    for _ in range(20):
        degree = int(random.integers(1, 3))
        together = [
            node.devices[start : start + degree]
            for node in topology.nodes
            for start in range(0, len(node.devices) - degree + 1, degree)
        ]
        order = random.permutation(len(together)).tolist()
        lengths, left = [], len(order)
        while left and len(lengths) < 3:
            lengths.append(int(random.integers(1, min(left, 3) + 1)))
            left -= lengths[-1]
        if not lengths:
            continue
        free = iter(order)
        groups = [[together[next(free)] for _ in range(length)] for length in lengths]
        inner = list(itertools.combinations(range(1, 4), 2))
        bounds = [(0, *inner[int(random.integers(3))][: length - 1], 4) for length in lengths]
        stages = [[SummingStage(group, gradients) for group in row] for row in groups]
        try:
            expected = times.seconds(links.node_kind, groups, bounds, gradients)
        except ValueError:
            continue
        assert UnlikeSumming(topology, stages).seconds(bounds) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bounds", [[(0, 2), (0, 2)], [(0, 2), (0, 1, 2)]])
def test_the_smallest_group_decides_how_many_rings_there_are(bounds: list[tuple[int, ...]]) -> None:
    """A device alone and groups of two: one ring with all gradients, as fast as the device's card."""
    kind = DeviceKind("gpu", 10**10, 1e12)
    inside, card = Channel("NVLink", 1e12), Channel("E", 1e9)
    nodes = (
        Node("a", 0, (0,), inside, (card,)),
        Node("b", 0, (1, 2), inside, (card,)),
        Node("c", 0, (3, 4), inside, (card,)),
    )
    topology = Topology((Device(kind, 0, 0), *(Device(kind, number, 0) for number in (1, 1, 2, 2))), nodes, ("here",))
    whole, half = np.array([1e9, 1e9]), np.array([0.5e9, 0.5e9])
    groups = [(1, 2), (3, 4)][: len(bounds[1]) - 1]
    stages = [[SummingStage((0,), whole)], [SummingStage(group, half) for group in groups]]
    # In a ring of two each device sends the bytes of its gradients once; the first stage sums its runs in turn.
    assert UnlikeSumming(topology, stages).seconds(bounds) == pytest.approx(2.0)
