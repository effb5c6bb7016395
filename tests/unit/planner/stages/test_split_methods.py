"""Stage splits: the exact split against all splits, also with recomputation; those of papers against their rules."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner.cluster.topology import Channel
from colossal_hetero.planner.profile.layer_costs import LayerCosts
from colossal_hetero.planner.stages.fixed_order import AllCuts, all_bounds, split_in_order
from colossal_hetero.planner.stages.pipeline import Pipeline, Slot, Split, evaluate
from colossal_hetero.planner.stages.split_methods import METHODS, adapt, split, uniform_bounds
from tests.support.random_examples import IS_THOROUGH, examples

ROUNDING = 1e-9
IN_MEMORY = ("exact", "adapt", "autohet")


def random_pipeline(random: np.random.Generator, max_slots: int = 4, max_blocks: int = 7) -> Pipeline:
    """Slots of up to 3 kinds in 3 nodes: equal or different blocks, enough or too little memory, fast or slow links."""
    stages = int(random.integers(1, max_slots + 1))
    blocks = int(random.integers(stages, max_blocks + 1))
    shape = random.integers(3)

    def values(low: int, high: int) -> np.ndarray:
        if shape == 0:
            return np.full(blocks, float(random.integers(low, high + 1)))
        if shape == 1:
            return random.integers(low, high + 1, blocks).astype(float)
        return random.uniform(low, high, blocks)

    kinds = [
        (
            LayerCosts(
                forward_seconds=values(1, 5),
                backward_seconds=values(1, 9),
                update_seconds=values(0, 6) * random.choice([0, 1, 5]),
                state_bytes=values(1, 10),
                gradient_bytes=values(1, 3),
                activation_bytes=values(1, 5),
                output_bytes=values(1, 10) if random.random() < 0.5 else np.full(blocks, 3.0),
                schedule_seconds=float(random.choice([0.0, 0.5, random.uniform(0, 9)])),
            ),
            float(random.choice([1e9, random.integers(5, 60)])),
        )
        for _ in range(random.integers(1, 4))
    ]
    chosen = [kinds[random.integers(len(kinds))] for _ in range(stages)]
    nodes = random.integers(3, size=stages)
    network = random.integers(5)

    def channel(a: int, b: int) -> Channel:
        if network < 3:
            return Channel("of all", (1e12, 2.0, np.inf)[network])
        if network == 3:
            return Channel("PCIe", 5.0) if nodes[a] == nodes[b] else Channel("Ethernet", 1.0, 0.1)
        return Channel("RoCE", 1.0 + (a * 7 + b * 7) % 5)

    slots = tuple(Slot(f"slot {number}", costs, memory) for number, (costs, memory) in enumerate(chosen))
    channels = tuple(tuple(channel(a, b) for b in range(stages)) for a in range(stages))
    return Pipeline(slots, channels, int(random.choice([1, 2, 3, 8, 64])))


def may_recompute(pipeline: Pipeline, random: np.random.Generator) -> Pipeline:
    """The pipeline with slots that may recompute, most of them, and then keep a part of the activations."""

    def slot(plain: Slot) -> Slot:
        costs, share = plain.costs, float(random.uniform(0, 0.5))
        backward, kept = costs.backward_seconds + costs.forward_seconds, share * costs.activation_bytes
        again = replace(costs, backward_seconds=backward, activation_bytes=kept)
        return plain if random.random() < 0.2 else replace(plain, recomputed=(again, plain.memory_bytes - 1.0))

    # Plans have at least as many micro-batches as stages.
    micro_batches = max(pipeline.micro_batches, len(pipeline.slots))
    return replace(pipeline, slots=tuple(map(slot, pipeline.slots)), micro_batches=micro_batches)


def every_split(pipeline: Pipeline, order: tuple[int, ...] | None = None):
    stages, blocks = len(pipeline.slots), pipeline.blocks
    for one in permutations(range(stages)) if order is None else [order]:
        for cuts in combinations(range(1, blocks), stages - 1):
            yield Split(one, (0, *cuts, blocks))


def plain_cost(pipeline: Pipeline, division: Split, *, updates: bool = True) -> tuple[bool, float]:
    """Whether a split fits in memory, and its time by the formula, with or without optimizer updates, computed with
    plain loops."""
    count, stages = pipeline.micro_batches, len(division.order)
    times, updating, fits = [0.0] * stages, [], True
    for s, index in enumerate(division.order):
        slot, blocks = pipeline.slots[index], range(division.bounds[s], division.bounds[s + 1])
        costs = slot.costs
        times[s] += sum(float(costs.forward_seconds[b] + costs.backward_seconds[b]) for b in blocks)
        updating.append(sum(float(costs.update_seconds[b]) for b in blocks))
        held = sum(float(costs.state_bytes[b]) for b in blocks)
        held += min(count, stages - s) * sum(float(costs.activation_bytes[b]) for b in blocks)
        fits = fits and held <= slot.memory_bytes
        if s + 1 < stages:
            channel = pipeline.channels[index][division.order[s + 1]]
            hop = channel.seconds(float(costs.output_bytes[division.bounds[s + 1] - 1]))
            times[s] += hop + costs.schedule_seconds
            times[s + 1] += hop + pipeline.slots[division.order[s + 1]].costs.schedule_seconds
    return fits, sum(times) + (count - 1) * max(times) + (max(updating) if updates else 0.0)


def min_seconds(pipeline: Pipeline, order: tuple[int, ...] | None = None, *, updates: bool = True) -> float:
    costs = [plain_cost(pipeline, division, updates=updates) for division in every_split(pipeline, order)]
    return min((seconds for fits, seconds in costs if fits), default=np.inf)


@pytest.mark.parametrize("seed", range(4))
def test_exact_is_the_best_of_all_splits_of_an_order(seed):
    """It does not look at optimizer updates."""
    random = np.random.default_rng(seed)
    impossible = 0
    count = 250 if IS_THOROUGH else 80
    for _ in range(count):
        pipeline = random_pipeline(random)
        order = tuple(int(slot) for slot in random.permutation(len(pipeline.slots)))
        best = min_seconds(pipeline, order, updates=False)
        if best == np.inf:
            impossible += 1
            with pytest.raises(ValueError, match="no split fits in memory"):
                split(pipeline, order=order)
            continue
        found = split(pipeline, order=order)
        assert found in every_split(pipeline, order)
        assert plain_cost(pipeline, found, updates=False) == (True, pytest.approx(best, rel=ROUNDING))
        assert evaluate(pipeline, found).seconds == pytest.approx(plain_cost(pipeline, found)[1], rel=ROUNDING)
    assert 0.04 * count < impossible < 0.8 * count


@examples(ordinary=50, thorough=150)
@given(st.integers(0, 2**32), st.sampled_from(METHODS), st.booleans())
def test_every_method_makes_valid_splits_none_better_than_exact_in_an_order(seed, method, ordered):
    random = np.random.default_rng(seed)
    pipeline = random_pipeline(random, max_slots=5, max_blocks=9)
    order = tuple(int(slot) for slot in random.permutation(len(pipeline.slots))) if ordered else None
    try:
        found = split(pipeline, method, order=order)
    except ValueError as error:
        assert method in IN_MEMORY
        assert "no split fits in memory" in str(error)
        assert min_seconds(pipeline, order) == np.inf or (method != "adapt" and order is None)
        return
    assert found in every_split(pipeline, order)
    cost = evaluate(pipeline, found)
    assert cost.fits or method not in IN_MEMORY
    if cost.fits and order is not None:
        best = evaluate(pipeline, split(pipeline, order=order))
        assert best.seconds - max(best.update_seconds) <= (cost.seconds - max(cost.update_seconds)) * (1 + ROUNDING)


def pipeline_of(speeds: list[float], blocks: int, *, count: int = 8, memory: list[float] | None = None) -> Pipeline:
    """Equal blocks of 1 byte of state and 1 of activations, no transfers."""
    kinds: dict[float, LayerCosts] = {}
    one = np.ones(blocks)
    for speed in speeds:
        if speed not in kinds:
            kinds[speed] = LayerCosts(one / speed, 2 * one / speed, 0 * one, one, one, one, 0 * one)
    memory = memory or [1e9] * len(speeds)
    slots = tuple(
        Slot(f"slot {i}", kinds[speed], size) for i, (speed, size) in enumerate(zip(speeds, memory, strict=True))
    )
    return Pipeline(slots, ((Channel("NVLink", 1e12),) * len(speeds),) * len(speeds), count)


def test_uniform_is_the_division_of_colossalai():
    stage_manager = pytest.importorskip("colossalai.pipeline.stage_manager")
    manager = object.__new__(stage_manager.PipelineStageManager)
    manager.num_layers_per_stage = None
    for blocks, stages in itertools.product((4, 5, 7, 12, 30), (1, 2, 3, 4)):
        theirs = manager.distribute_layers(blocks, num_stages=stages, num_model_chunks=1)
        assert [b - a for a, b in pairwise(uniform_bounds(blocks, stages))] == theirs


@pytest.mark.parametrize(
    ("speeds", "blocks", "parts"),
    [
        ([197.0, 160.0], 30, (17, 13)),  # ⌊1.05·30·197/357⌋
        ([160.0, 197.0], 30, (13, 17)),
        ([1.0, 1.0], 9, (4, 5)),
        ([4.0, 2.0, 1.0, 1.0], 32, (16, 8, 4, 4)),  # ⌊16.8⌋, ⌊8.4⌋, and the rest
        ([100.0, 1.0, 1.0], 6, (4, 1, 1)),
    ],
)
def test_holmes(speeds, blocks, parts):
    assert split(pipeline_of(speeds, blocks), "holmes").blocks_per_stage == parts


def test_holmes_takes_the_speeds_that_clusters_reached_in_training():
    """The same GPUs, joined by InfiniBand and by RoCE, reached 197 and 160 TFLOP/s (Table 1)."""
    equal = pipeline_of([1.0, 1.0], 30)
    slots = tuple(replace(slot, training_speed=speed) for slot, speed in zip(equal.slots, (160.0, 197.0), strict=True))
    assert split(replace(equal, slots=slots), "holmes").blocks_per_stage == (13, 17)
    assert split(replace(equal, slots=(slots[0], equal.slots[1])), "holmes").blocks_per_stage == (15, 15)


def test_autohet_has_the_smallest_maximum_load_that_fits():
    random = np.random.default_rng(3)
    for _ in range(100):
        stages, blocks = int(random.integers(1, 5)), int(random.integers(4, 10))
        speeds = random.integers(1, 5, stages).astype(float).tolist()
        memory = random.choice([4.0, 8.0, 12.0, 100.0], stages).tolist()
        pipeline = pipeline_of(speeds, blocks, memory=memory)
        order = tuple(sorted(range(stages), key=lambda slot: speeds[slot]))

        def load(division: Split, speeds: list[float] = speeds) -> float:
            return max(n / speeds[slot] for n, slot in zip(division.blocks_per_stage, division.order, strict=True))

        loads = [load(one) for one in every_split(pipeline, order) if plain_cost(pipeline, one)[0]]
        if not loads:
            with pytest.raises(ValueError, match="no split fits in memory"):
                split(pipeline, "autohet")
            continue
        found = split(pipeline, "autohet")
        assert found.order == order
        assert load(found) == pytest.approx(min(loads))


def test_adapt_has_the_smallest_adapt_cost():
    random = np.random.default_rng(4)
    for _ in range(60):
        pipeline = random_pipeline(random)

        def cost(division: Split, pipeline: Pipeline = pipeline) -> float:
            found = evaluate(pipeline, division)
            work = [f + b for f, b in zip(found.forward_seconds, found.backward_seconds, strict=True)]
            return sum(work) + (pipeline.micro_batches - 1) * max(work) + sum(found.hop_seconds)

        costs = [cost(one) for one in every_split(pipeline) if plain_cost(pipeline, one)[0]]
        if costs:
            assert cost(split(pipeline, "adapt")) == pytest.approx(min(costs))


def test_adapt_stops_after_the_maximum_number_of_nodes():
    pipeline = pipeline_of([1.0, 2.0, 3.0, 4.0] * 4, 48)
    found = adapt(pipeline, None, nodes=2000)
    assert found is not None and sorted(found.order) == list(range(16)) and min(found.blocks_per_stage) >= 1
    tight = pipeline_of([1.0, 2.0, 3.0, 4.0] * 4, 48, memory=[13.0] * 16)
    with pytest.raises(ValueError, match="2,000 nodes"):
        adapt(tight, None, nodes=2000)


@pytest.mark.parametrize(
    ("pipeline", "options", "words"),
    [
        *((pipeline_of([1.0] * 3, 2), dict(method=method), "3 stages for 2 blocks") for method in METHODS),
        # The first stage holds the activations of two micro-batches: 1 + 2·1.
        (
            pipeline_of([1.0, 2.0], 4, memory=[1.5, 1.6]),
            {},
            r"block 0 alone needs 3e-09 GB in slot slot 1",
        ),
        (
            pipeline_of([1.0, 2.0], 8, memory=[6.0, 6.0]),
            {},
            r"blocks .* as stage 1, with 1 micro-batch in flight",
        ),
    ],
)
def test_what_cannot_be_split(pipeline: Pipeline, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split(pipeline, **options)


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


@pytest.mark.parametrize("seed", range(120 if IS_THOROUGH else 40))
def test_each_cut_costs_what_the_best_choice_costs(seed: int) -> None:
    random = np.random.default_rng(seed)
    pipeline = may_recompute(random_pipeline(random, 3, 5), random)
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
