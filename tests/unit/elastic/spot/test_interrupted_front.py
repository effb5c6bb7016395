"""Spot nodes are taken if they are cheaper with their interruptions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from colossal_hetero.elastic.replay.assumptions import Assumptions
from colossal_hetero.elastic.spot.interrupted_front import interrupted_front
from colossal_hetero.planner.cluster.topology import SpotTerms, Topology
from colossal_hetero.planner.plans.runnable import NoPlanError
from colossal_hetero.planner.prices.node_choice import node_types
from colossal_hetero.planner.prices.pareto_front import FrontPoint, choose, pareto_front
from tests.support.random_clusters import Problem, small_problem

pytestmark = pytest.mark.unit


def spot_and_fixed(terms: SpotTerms) -> Problem:
    """A random problem whose nodes are there twice: for a dollar as they are, and for a third of it as spot nodes."""
    problem = small_problem(3)
    topology = problem.topology
    nodes, devices = [], []
    for number, node in enumerate(topology.nodes * 2):
        is_spot = number >= len(topology.nodes)
        ranks = tuple(range(len(devices), len(devices) + len(node.devices)))
        devices += [dataclasses.replace(topology.devices[rank], node=number) for rank in node.devices]
        name = f"{'spot' if is_spot else 'fixed'}-{number % len(topology.nodes)}"
        price = len(ranks) * (0.3 if is_spot else 1.0)
        spot = terms if is_spot else None
        nodes.append(dataclasses.replace(node, name=name, devices=ranks, dollars_per_hour=price, spot=spot))
    both: Topology = dataclasses.replace(topology, devices=tuple(devices), nodes=tuple(nodes))
    return problem._replace(topology=both)


def front_of(problem: Problem, **options: Any) -> list[FrontPoint]:
    # Iterations of these problems take seconds; a recovery takes a hundredth of an hour.
    assumptions = Assumptions(dead_wait_seconds=36.0)
    return interrupted_front(
        problem.topology, problem.profile, assumptions, global_batch=problem.global_batch, **options
    )


def spot_nodes(problem: Problem, point: FrontPoint) -> int:
    types = node_types(problem.topology)
    return sum(n for n, each in zip(point.nodes, types, strict=True) if problem.topology.nodes[each.nodes[0]].spot)


def test_rarely_interrupted_nodes_are_taken_for_their_price() -> None:
    problem = spot_and_fixed(SpotTerms(0.01, 1.0))
    cheapest = choose(front_of(problem), "cost")
    assert spot_nodes(problem, cheapest) > 0
    assert cheapest.interrupted is not None
    assert 1.0 < cheapest.seconds / cheapest.plan.iteration_seconds < 1.05


def test_nodes_that_are_hardly_ever_there_are_not_taken() -> None:
    problem = spot_and_fixed(SpotTerms(60.0, 1.0))
    front = front_of(problem)
    for objective in ("time", "cost"):
        assert spot_nodes(problem, choose(front, objective)) == 0  # type: ignore[arg-type]


def test_the_front_is_monotone_with_interruptions() -> None:
    front = front_of(spot_and_fixed(SpotTerms(1.0, 20.0)))
    assert front == sorted(front, key=lambda point: point.seconds)
    assert [point.dollars for point in front] == sorted((point.dollars for point in front), reverse=True)


@pytest.mark.parametrize("price", [0.0, 1.0])
def test_nodes_on_which_no_iteration_ever_counts(price: float) -> None:
    """A thousand times per hour is more often than processes can start."""
    problem = spot_and_fixed(SpotTerms(1000.0, 10_000.0))
    front = front_of(problem)
    assert front and all(math.isfinite(point.seconds) and spot_nodes(problem, point) == 0 for point in front)
    spot = SpotTerms(1000.0, 10_000.0)
    nodes = tuple(dataclasses.replace(each, spot=spot, dollars_per_hour=price) for each in problem.topology.nodes)
    only_spot = problem._replace(topology=dataclasses.replace(problem.topology, nodes=nodes))
    with pytest.raises(
        NoPlanError, match=r"no iteration ever counts \(fixed.*: preemptions_per_hour 1000, replacement"
    ):
        front_of(only_spot)


def test_what_is_sent_between_clusters_is_paid_with_interruptions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = spot_and_fixed(SpotTerms(0.1, 10.0))
    before = {(point.nodes, point.plan.iteration_seconds): point.dollars for point in front_of(problem)}

    def with_egress(*arguments: Any, **options: Any) -> list[FrontPoint]:
        points = pareto_front(*arguments, **options)
        return [dataclasses.replace(each, cost=dataclasses.replace(each.cost, egress_dollars=5.0)) for each in points]

    monkeypatch.setattr("colossal_hetero.elastic.spot.interrupted_front.pareto_front", with_egress)
    after = {(point.nodes, point.plan.iteration_seconds): point.dollars for point in front_of(problem)}
    both = before.keys() & after.keys()
    assert both and all(after[each] == pytest.approx(before[each] + 5.0) for each in both)
