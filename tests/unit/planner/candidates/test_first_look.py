"""A first look at a candidate searches few orders of its stages, a thorough one all; a quick search never does."""

from __future__ import annotations

import pytest

from colossal_hetero.planner.cost import pipeline_prices
from colossal_hetero.planner.cost.draft import Draft, DraftBuilder
from colossal_hetero.planner.search.settings import slots_to_try
from tests.support.random_clusters import large_problem


def pipeline_over_all(seed: int, *looks: bool, quick: bool = False) -> list[float]:
    """Seconds of one pipeline over all slots of a random cluster, whose order is free. By look: whether it is
    thorough, and all by one builder; infinite if no split fits."""
    topology, profile, global_batch = large_problem(seed)
    pool = slots_to_try(topology, profile, global_batch, [1], [1]).pools[0]
    builder = DraftBuilder(topology, "exact", quick=quick)
    places = [[(kind, slot) for kind, each in enumerate(pool.kinds) for slot in range(len(each.slots))]]
    found = [builder.build_placed(pool, places, symmetric=True, thorough=thorough) for thorough in looks]
    return [draft.pipeline_seconds if isinstance(draft, Draft) else float("inf") for draft in found]


def test_a_thorough_look_after_a_first_one_searches_all_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where all orders are too many for a first look: then it is never faster, and sometimes slower."""
    slower = 0
    for seed in range(60):
        whole = pipeline_over_all(seed, True)[0]
        with monkeypatch.context() as patch:
            patch.setattr(pipeline_prices, "FIRST_STATES", 0)
            first, thorough = pipeline_over_all(seed, False, True)
        assert thorough == whole
        assert first >= whole * (1 - 1e-12)
        slower += first > whole * (1 + 1e-9)
    assert slower


def test_a_quick_search_looks_at_fewer_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_prices, "QUICK_STATES", 0)
    slower = 0
    for seed in range(60):
        (whole,), (quick,) = pipeline_over_all(seed, True), pipeline_over_all(seed, True, quick=True)
        assert quick >= whole * (1 - 1e-12)
        slower += quick > whole * (1 + 1e-9)
    assert slower
