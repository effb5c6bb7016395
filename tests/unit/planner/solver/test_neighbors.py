"""Neighborhoods of equal pipelines lead to the best arrangement of all, or nearly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.draft import DraftBuilder
from colossal_hetero.planner.cost.placed_pipelines import PlacedPipelines
from colossal_hetero.planner.cost.placement import NodeLinks, SlotPool
from colossal_hetero.planner.cost.tp_groups import slot_kinds
from colossal_hetero.planner.solver.neighbors import Neighborhood
from colossal_hetero.planner.solver.pipeline_bounds import PipelineBounds
from tests.support.random_clusters import random_cluster, random_model

DEVICES = 6


def pool_of(seed: int) -> tuple[Topology, SlotPool]:
    random = np.random.default_rng(seed)
    model = random_model(random)
    topology = random_cluster(random, DEVICES)
    kinds = slot_kinds(topology, model, 1, 1)
    return topology, SlotPool(1, 1, tuple(kinds), 12, NodeLinks(topology, float(kinds[0].costs.output_bytes.max())))


@pytest.mark.parametrize(("pipelines", "stages"), [(2, 3), (3, 2), (1, 4), (4, 1)])
def test_nearly_the_best_of_all_arrangements_is_found(pipelines: int, stages: int) -> None:
    factors = []
    for seed in range(12):
        topology, pool = pool_of(seed)
        if stages > len(pool.kinds[0].costs.forward_seconds):
            continue
        builder = DraftBuilder(topology, "exact")
        placed, bounds = PlacedPipelines(builder, pool), PipelineBounds.of_pool(pool)
        neighborhood = Neighborhood(builder, pool, bounds, lambda _: 0.0, None, all_slots=False)
        slots = [(kind, slot) for kind, each in enumerate(pool.kinds) for slot in range(len(each.slots))]
        best = np.inf
        for chosen in itertools.permutations(slots, pipelines * stages):
            rows = tuple(chosen[first * stages : (first + 1) * stages] for first in range(pipelines))
            if list(rows) == sorted(rows):  # each set of pipelines once
                draft = placed.best(rows, best)
                best = draft.seconds if draft is not None else best
        starts = neighborhood.starts(pipelines, stages)
        if best == np.inf or not starts:
            assert best == np.inf or len(slots) < DEVICES
            continue
        found = [neighborhood.improved(start, 400, equal=True).seconds for start in starts]
        assert all(after <= start.seconds for after, start in zip(found, starts, strict=True))
        factors.append(min(found) / best)
    assert len(factors) >= 4
    assert max(factors) < 1.05
    assert np.mean([factor < 1 + 1e-9 for factor in factors]) >= 0.8
