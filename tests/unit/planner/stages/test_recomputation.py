"""Stages that may recompute, against every choice of which stages do, with every cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from colossal_hetero.planner.cluster.topology import Channel
from colossal_hetero.planner.profile.layer_costs import LayerCosts
from colossal_hetero.planner.stages.fixed_order import AllCuts, all_bounds, split_in_order
from colossal_hetero.planner.stages.pipeline import Pipeline, Slot, Split, evaluate
from tests.support.random_examples import IS_THOROUGH

pytestmark = pytest.mark.unit

PIPELINES = 120 if IS_THOROUGH else 40


def random_pipeline(random: np.random.Generator) -> Pipeline:
    blocks, stages = int(random.integers(2, 6)), int(random.integers(1, 4))
    updates = random.random() < 0.5

    def slot(number: int) -> Slot:
        costs = LayerCosts(
            forward_seconds=random.uniform(0.5, 2, blocks),
            backward_seconds=random.uniform(1, 4, blocks),
            update_seconds=random.uniform(0, 3, blocks) if updates else np.zeros(blocks),
            state_bytes=random.uniform(0, 2, blocks),
            gradient_bytes=np.ones(blocks),
            activation_bytes=random.uniform(2, 4, blocks),
            output_bytes=np.ones(blocks),
            schedule_seconds=float(random.choice([0.0, 0.5])),
        )
        memory = float(random.choice([6.0, 10.0, 16.0, 30.0]))
        if random.random() < 0.2:
            return Slot(f"slot {number}", costs, memory)
        again = LayerCosts(
            **{
                **vars(costs),
                "backward_seconds": costs.backward_seconds + costs.forward_seconds,
                "activation_bytes": random.uniform(0, 1, blocks),
            }
        )
        return Slot(f"slot {number}", costs, memory, (again, memory - 1.0))

    slots = tuple(slot(number) for number in range(stages))
    channels = tuple(
        tuple(Channel("link", float(random.choice([1.0, 4.0])), 0.1) for _ in range(stages)) for _ in range(stages)
    )
    return Pipeline(slots, channels, stages + int(random.choice([0, 1, 9])))


def every_choice(pipeline: Pipeline, division: Split) -> list[tuple[tuple[bool, ...], float, bool]]:
    """For every choice of stages that recompute: the choice, the seconds, and whether updates were left out."""
    found = []
    may = [(False, True) if pipeline.slots[index].recomputed else (False,) for index in division.order]
    for chosen in itertools.product(*may):
        slots = list(pipeline.slots)
        for index, again in zip(division.order, chosen, strict=True):
            slot = slots[index]
            costs, memory = slot.recomputed if again and slot.recomputed else (slot.costs, slot.memory_bytes)
            slots[index] = Slot(slot.name, costs, memory)
        cost = evaluate(Pipeline(tuple(slots), pipeline.channels, pipeline.micro_batches), division)
        if cost.fits:
            found.append((chosen, cost.seconds, cost.seconds - max(cost.update_seconds)))
    return found


@pytest.mark.parametrize("seed", range(PIPELINES))
def test_each_cut_costs_what_the_best_choice_costs(seed: int) -> None:
    pipeline = random_pipeline(np.random.default_rng(seed))
    stages = len(pipeline.slots)
    bounds = all_bounds(pipeline.blocks, stages)
    if bounds is None:
        return
    own = tuple(range(stages))
    hops = [pipeline.channels[stage][stage + 1] for stage in range(stages - 1)]
    times = AllCuts(bounds).times(pipeline.slots, hops).seconds(pipeline.micro_batches)
    found, shortest = [], np.inf
    for cut in bounds.tolist():
        choices = every_choice(pipeline, Split(own, tuple(cut)))
        cost = evaluate(pipeline, Split(own, tuple(cut)))
        assert cost.fits == bool(choices)
        if choices:
            chosen, seconds, _ = min(choices, key=lambda each: each[1:2])
            assert cost.seconds == pytest.approx(seconds, rel=1e-12)
            if cost.recompute:
                assert sum(cost.recompute) <= sum(chosen)
        found.append(min((seconds for _, seconds, _ in choices), default=np.inf))
        shortest = min(shortest, *(without for _, _, without in choices), np.inf)
    np.testing.assert_allclose(times, found, rtol=1e-12)
    fastest = split_in_order(pipeline.slots, hops, pipeline.micro_batches)
    assert (fastest is None) == (shortest == np.inf)
    if fastest is not None:
        cost = evaluate(pipeline, fastest)
        assert cost.seconds - max(cost.update_seconds) == pytest.approx(shortest, rel=1e-9)


def test_some_of_these_pipelines_recompute() -> None:
    costs = []
    for seed in range(40):
        pipeline = random_pipeline(np.random.default_rng(seed))
        own = tuple(range(len(pipeline.slots)))
        cuts = itertools.combinations(range(1, pipeline.blocks), len(own) - 1)
        costs += [evaluate(pipeline, Split(own, (0, *each, pipeline.blocks))) for each in cuts]
    recomputing = [cost for cost in costs if cost.fits and any(cost.recompute)]
    assert len(recomputing) > 20
    assert any(not all(cost.recompute) for cost in recomputing)
