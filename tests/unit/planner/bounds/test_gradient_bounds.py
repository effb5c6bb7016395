"""Sums of gradients never take less than the lower bounds, whichever slots, cuts and orders."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest

from colossal_hetero.planner.cluster.topology import Channel, Device, Node, Topology
from colossal_hetero.planner.cost.draft import DraftBuilder
from colossal_hetero.planner.cost.placement import SlotPool
from colossal_hetero.planner.solver.gradient_bounds import GradientBounds
from tests.support.random_clusters import Problem, large_problem, like_nodes_problem
from tests.support.random_examples import IS_THOROUGH

pytestmark = pytest.mark.unit

PROBLEMS = 200 if IS_THOROUGH else 30
PLANS = 40


def random_plan(
    random: np.random.Generator, pool: SlotPool, blocks: int
) -> tuple[list[list[tuple[int, int]]], list[tuple[int, ...]]] | None:
    """The slots of each of at least two pipelines, and their cuts; often all are cut alike."""
    slots = [(kind, slot) for kind, each in enumerate(pool.kinds) for slot in range(len(each.slots))]
    if len(slots) < 2:
        return None
    pipelines = int(random.integers(2, len(slots) + 1))
    most = min(len(slots) // pipelines, blocks)
    equal = bool(random.random() < 0.4)
    lengths = [int(random.integers(1, most + 1))] * pipelines if equal else random.integers(1, most + 1, pipelines)
    order = random.permutation(len(slots)).tolist() if random.random() < 0.5 else list(range(len(slots)))
    rows, bounds = [], []
    for length in lengths:
        rows.append([slots[order.pop()] for _ in range(length)])
        inner = sorted(random.choice(np.arange(1, blocks), length - 1, replace=False).tolist())
        bounds.append((0, *inner, blocks))
    return rows, [bounds[0]] * pipelines if equal else bounds


class RandomPlan(NamedTuple):
    """A random plan of a random problem."""

    builder: DraftBuilder
    pool: SlotPool
    bound: GradientBounds
    rows: list[list[tuple[int, int]]]
    cuts: list[tuple[int, ...]]

    @property
    def blocks(self) -> int:
        """Blocks of the model."""
        return self.cuts[0][-1]


def random_plans(make: Callable[[int], Problem]) -> Iterator[RandomPlan]:
    for seed in range(PROBLEMS):
        problem = make(seed).to_search()
        builder, random = DraftBuilder(problem.topology, "exact"), np.random.default_rng(seed)
        for pool in problem.pools[::2]:
            bound = GradientBounds(problem.topology, pool)
            for _ in range(PLANS):
                made = random_plan(random, pool, problem.profile.blocks)
                if made is not None:
                    yield RandomPlan(builder, pool, bound, *made)


def nodes_by_block(
    topology: Topology, pool: SlotPool, rows: Sequence[Sequence[tuple[int, int]]], bounds: Sequence[tuple[int, ...]]
) -> list[set[int]]:
    """The nodes that have a slot with the block, for each block."""
    found = []
    for block in range(bounds[0][-1]):
        nodes = set()
        for row, cut in zip(rows, bounds, strict=True):
            (kind, slot) = row[sum(bound <= block for bound in cut) - 1]
            nodes.add(topology.devices[pool.kinds[kind].slots[slot][0]].node)
        found.append(nodes)
    return found


@pytest.mark.parametrize("make", [large_problem, like_nodes_problem])
def test_no_plan_sums_faster(make: Callable[[int], Problem]) -> None:
    some = every = 0
    for plan in random_plans(make):
        try:
            seconds = plan.builder.summing(plan.pool, plan.rows).seconds(plan.cuts)
        except ValueError:
            continue
        nodes = nodes_by_block(plan.builder.topology, plan.pool, plan.rows, plan.cuts)
        crossing = [each for each in nodes if len(each) > 1]
        in_a_node = max(Counter(itertools.chain.from_iterable(crossing)).values(), default=0)
        some += 0 < len(crossing) < plan.blocks
        assert plan.bound.of_blocks(len(plan.rows), in_a_node) <= seconds
        assert len(crossing) <= plan.bound.crossing_blocks(len(plan.rows), in_a_node)
        if len(crossing) == plan.blocks:
            every += 1
            assert plan.bound.of_pipelines(len(plan.rows)) <= seconds
    assert some > 10 and every > 50


def test_bounds_are_reached() -> None:
    """Two nodes with two slots each: each pair of slots in a node holds the same half of the model."""
    problem = like_nodes_problem(0)
    inside, card = Channel("NVLink", 1e12), Channel("RoCE", 1e9, 1e-3)
    nodes = tuple(Node(f"n{n}", 0, (2 * n, 2 * n + 1), inside, (card,)) for n in range(2))
    kind = problem.topology.devices[0].kind
    topology = Topology(tuple(Device(kind, n // 2, 0) for n in range(4)), nodes, ("here",))
    pool = problem._replace(topology=topology).to_search(tensor_parallel=(1,)).pools[0]
    lower, model_bytes = GradientBounds(topology, pool), float(pool.kinds[0].costs.gradient_bytes.sum())
    blocks = problem.profile.blocks
    # Four pipelines of one stage: every node sends the whole model, each device a quarter of it at a time.
    rows = [[(0, slot)] for slot in range(4)]
    seconds = DraftBuilder(topology, "exact").summing(pool, rows).seconds([(0, blocks)] * 4)
    assert seconds == pytest.approx(2 * 3 * (model_bytes / 4 / 1e9 + 1e-3))
    assert lower.of_blocks(4, blocks) == pytest.approx(seconds)
    assert lower.of_pipelines(4) == pytest.approx(seconds)
