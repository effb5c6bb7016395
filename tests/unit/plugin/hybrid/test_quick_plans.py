"""Plans that are made quickly: without restarts of the search; elastic training always makes them so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from colossal_hetero.planner.search.exchanges import Exchanges

from colossal_hetero.plugin.elastic.elastic_arguments import elastic_planning
from colossal_hetero.plugin.hybrid.plan_agreement import best_plan
from colossal_hetero.plugin.plan_config import PlanConfig
from tests.support.random_clusters import random_cluster, random_model


@pytest.mark.parametrize("quick", [False, True])
def test_quick_plans_are_made_without_restarts(quick: bool) -> None:
    times: list[int] = []
    restarted = Exchanges.restarted

    def counted(self: Exchanges, draft: Any, count: int, most: int) -> Any:
        times.append(count)
        return restarted(self, draft, count, most)

    with patch.object(Exchanges, "restarted", counted):
        for seed in range(4):
            random = np.random.default_rng(seed)
            model, topology = random_model(random), random_cluster(random, 8, max_memory=1000)
            plan = best_plan(PlanConfig(global_batch_size=24, quick=quick), topology, model)
            used = [rank for replica in plan.replicas for stage in replica.stages for rank in stage.ranks]
            assert sorted(used) == list(range(len(topology.devices)))
    assert bool(times) is not quick


def test_elastic_training_plans_quickly() -> None:
    random = np.random.default_rng(0)
    model, topology = random_model(random), random_cluster(random, 4)
    known: Any = SimpleNamespace(with_kinds=lambda kinds: model)
    names = [node.name for node in topology.nodes]
    planning = elastic_planning({"planning": PlanConfig(global_batch_size=8)}, topology, known, names)
    assert planning.quick and planning.layer_sums
