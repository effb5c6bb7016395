"""The best split in a given order, compared with all splits in that order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner.cluster.topology import Channel
from colossal_hetero.planner.profile.layer_costs import LayerCosts
from colossal_hetero.planner.stages.fixed_order import split_in_order
from colossal_hetero.planner.stages.pipeline import Pipeline, Slot, Split, evaluate
from tests.support.random_examples import examples


def random_pipeline(seed: int, blocks: int, stages: int, micro_batches: int, memory: float) -> Pipeline:
    random = np.random.default_rng(seed)
    output = random.choice([1.0, 2.0], blocks)
    slots = tuple(
        Slot(
            f"slot {number}",
            LayerCosts(
                forward_seconds=random.uniform(0.5, 2, blocks),
                backward_seconds=random.choice([1.0, 2.0, 3.0], blocks),
                update_seconds=np.zeros(blocks),
                state_bytes=np.ones(blocks),
                gradient_bytes=np.ones(blocks),
                activation_bytes=np.ones(blocks),
                output_bytes=output,
                schedule_seconds=float(random.choice([0.0, 1.5])),
            ),
            memory,
        )
        for number in range(stages)
    )
    channels = tuple(
        tuple(Channel("link", float(random.choice([1.0, 4.0])), 0.1) for _ in range(stages)) for _ in range(stages)
    )
    return Pipeline(slots, channels, micro_batches)


@examples(ordinary=80, thorough=200)
@given(
    seed=st.integers(0, 10**6),
    blocks=st.integers(1, 9),
    stages=st.integers(1, 5),
    micro_batches=st.sampled_from([1, 2, 3, 7, 40]),
    memory=st.sampled_from([4.0, 7.0, 12.0, 100.0]),
)
def test_best_of_all_splits_of_this_order(
    seed: int, blocks: int, stages: int, micro_batches: int, memory: float
) -> None:
    pipeline = random_pipeline(seed, blocks, stages, micro_batches, memory)
    order = tuple(range(stages))
    costs = [
        evaluate(pipeline, Split(order, (0, *inner, blocks)))
        for inner in itertools.combinations(range(1, blocks), stages - 1)
    ]
    best = min((cost.seconds for cost in costs if cost.fits), default=None)
    found = split_in_order(pipeline.slots, [pipeline.channels[a][a + 1] for a in order[:-1]], micro_batches)
    if best is None:
        assert found is None
    else:
        assert found is not None
        cost = evaluate(pipeline, found)
        assert cost.fits and cost.seconds == pytest.approx(best, rel=1e-9)
