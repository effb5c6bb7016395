"""The times of all cuts are those of the closed form, one cut at a time."""

from __future__ import annotations

import numpy as np
import pytest

from colossal_hetero.planner.cluster.topology import Channel
from colossal_hetero.planner.stages.fixed_order import AllCuts, all_bounds
from colossal_hetero.planner.stages.pipeline import Pipeline, Slot, Split, evaluate
from tests.support.random_clusters import random_model

CHANNELS = [Channel("fast", 1e10, 1e-5), Channel("slow", 1e8, 1e-4)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_all_cuts_cost_what_the_closed_form_says(seed: int, stages: int) -> None:
    random = np.random.default_rng(seed)
    profile = random_model(random)
    if stages > profile.blocks:
        pytest.skip("more stages than blocks")
    costs = [profile.costs(kind, 1, 1) for kind in random.choice(["A", "B", "C"], stages).tolist()]
    slots = [Slot("slot", each, float(random.choice([24, 40, 60]))) for each in costs]
    hops = [CHANNELS[int(random.integers(2))] for _ in range(stages - 1)]
    channels = [[hops[min(a, b)] if abs(a - b) == 1 else CHANNELS[0] for b in range(stages)] for a in range(stages)]
    bounds = all_bounds(profile.blocks, stages)
    assert bounds is not None
    times = AllCuts(bounds).times(slots, hops)
    for micro_batches in (1, 2, 5):
        pipeline = Pipeline(tuple(slots), tuple(map(tuple, channels)), micro_batches)
        costs_of = [evaluate(pipeline, Split(tuple(range(stages)), tuple(cut))) for cut in bounds.tolist()]
        expected = [cost.seconds if cost.fits else np.inf for cost in costs_of]
        np.testing.assert_allclose(times.seconds(micro_batches), expected, rtol=1e-12)
