"""Stage splits: the exact split against all splits, also with recomputation; those of papers against their rules."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest

from colossal_hetero.planner.cluster.topology import Channel
from colossal_hetero.planner.profile.layer_costs import LayerCosts
from colossal_hetero.planner.stages.fixed_order import AllCuts, all_bounds
from colossal_hetero.planner.stages.pipeline import PipelineCost, Slot, evaluate
from colossal_hetero.planner.stages.split_methods import split, uniform_bounds
from tests.support.random_examples import IS_THOROUGH

ROUNDING = 1e-9
Bounds = tuple[int, ...]


class Pipeline(NamedTuple):
    slots: list[Slot]
    hops: list[Channel]
    micro_batches: int

    def cost(self, bounds: Bounds) -> PipelineCost:
        return evaluate(*self, bounds)

    @property
    def every_split(self) -> list[Bounds]:
        stages, blocks = len(self.slots), len(self.slots[0].costs.forward_seconds)
        return [(0, *cuts, blocks) for cuts in itertools.combinations(range(1, blocks), stages - 1)]

    def min_of(self, value: Callable[[Bounds], float]) -> float:
        return min((value(bounds) for bounds in self.every_split if plain_cost(self, bounds)[0]), default=np.inf)


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
            ),
            float(random.choice([1e9, random.integers(5, 60)])),
        )
        for _ in range(random.integers(1, 4))
    ]
    chosen = [kinds[random.integers(len(kinds))] for _ in range(stages)]
    nodes = random.integers(3, size=stages)
    network = random.integers(5)

    def channel(stage: int) -> Channel:
        if network < 3:
            return Channel("of all", (1e12, 2.0, np.inf)[network])
        if network == 3:
            return Channel("PCIe", 5.0) if nodes[stage] == nodes[stage + 1] else Channel("Ethernet", 1.0, 0.1)
        return Channel("RoCE", 1.0 + (stage * 14 + 7) % 5)

    slots = [Slot(f"slot {number}", costs, memory) for number, (costs, memory) in enumerate(chosen)]
    return Pipeline(slots, [channel(stage) for stage in range(stages - 1)], int(random.choice([1, 2, 3, 8, 64])))


def plain_cost(pipeline: Pipeline, bounds: Bounds, *, updates: bool = True) -> tuple[bool, float]:
    """Whether a split fits in memory, and its time by the formula, with or without optimizer updates, computed with
    plain loops."""
    slots, hops, count = pipeline
    stages = len(slots)
    times, updating, fits = [0.0] * stages, [], True
    for s, slot in enumerate(slots):
        costs, blocks = slot.costs, range(bounds[s], bounds[s + 1])
        times[s] += sum(float(costs.forward_seconds[b] + costs.backward_seconds[b]) for b in blocks)
        updating.append(sum(float(costs.update_seconds[b]) for b in blocks))
        held = sum(float(costs.state_bytes[b]) for b in blocks)
        held += min(count, stages - s) * sum(float(costs.activation_bytes[b]) for b in blocks)
        fits = fits and held <= slot.memory_bytes
        if s + 1 < stages:
            hop = hops[s].seconds(float(costs.output_bytes[bounds[s + 1] - 1]))
            times[s] += hop
            times[s + 1] += hop
    return fits, sum(times) + (count - 1) * max(times) + (max(updating) if updates else 0.0)


@pytest.mark.parametrize("seed", range(4))
def test_exact_and_adapt_have_the_smallest_costs_of_all_splits(seed):
    """They do not look at optimizer updates."""
    random = np.random.default_rng(seed)
    impossible = 0
    count = 250 if IS_THOROUGH else 80
    for _ in range(count):
        pipeline = random_pipeline(random)

        def seconds(bounds: Bounds, pipeline: Pipeline = pipeline) -> float:
            return plain_cost(pipeline, bounds, updates=False)[1]

        def adapt_cost(bounds: Bounds, pipeline: Pipeline = pipeline) -> float:
            found = pipeline.cost(bounds)
            work = [f + b for f, b in zip(found.forward_seconds, found.backward_seconds, strict=True)]
            return sum(work) + (pipeline.micro_batches - 1) * max(work) + sum(found.hop_seconds)

        best = pipeline.min_of(seconds)
        if best == np.inf:
            impossible += 1
            for method in ("exact", "adapt"):
                with pytest.raises(ValueError, match="no split fits in memory"):
                    split(*pipeline, method)
            continue
        found = split(*pipeline)
        assert found in pipeline.every_split
        assert plain_cost(pipeline, found, updates=False) == (True, pytest.approx(best, rel=ROUNDING))
        assert pipeline.cost(found).seconds == pytest.approx(plain_cost(pipeline, found)[1], rel=ROUNDING)
        assert split(*pipeline, below=best * (1 + ROUNDING)) == found
        with pytest.raises(ValueError, match="fast enough"):
            split(*pipeline, below=best * (1 - ROUNDING))
        assert adapt_cost(split(*pipeline, "adapt")) == pytest.approx(pipeline.min_of(adapt_cost))
    assert 0.04 * count < impossible < 0.8 * count


def pipeline_of(speeds: list[float], blocks: int, *, memory: list[float] | None = None) -> Pipeline:
    """Equal blocks of 1 byte of state and 1 of activations, no transfers."""
    one = np.ones(blocks)
    kinds = {speed: LayerCosts(one / speed, 2 * one / speed, 0 * one, one, one, one, 0 * one) for speed in speeds}
    sizes = memory or [1e9] * len(speeds)
    slots = [Slot(f"slot {i}", kinds[speed], size) for i, (speed, size) in enumerate(zip(speeds, sizes, strict=True))]
    return Pipeline(slots, [Channel("NVLink", 1e12)] * (len(speeds) - 1), 8)


def parts(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in pairwise(bounds))


def test_uniform_is_the_division_of_colossalai():
    stage_manager = pytest.importorskip("colossalai.pipeline.stage_manager")
    manager = object.__new__(stage_manager.PipelineStageManager)
    manager.num_layers_per_stage = None
    for blocks, stages in itertools.product((4, 5, 7, 12, 30), (1, 2, 3, 4)):
        theirs = manager.distribute_layers(blocks, num_stages=stages, num_model_chunks=1)
        assert list(parts(uniform_bounds(blocks, stages))) == theirs


def test_holmes() -> None:
    for speeds, blocks, expected in (
        ([197.0, 160.0], 30, (17, 13)),  # ⌊1.05·30·197/357⌋
        ([160.0, 197.0], 30, (13, 17)),
        ([1.0, 1.0], 9, (4, 5)),
        ([4.0, 2.0, 1.0, 1.0], 32, (16, 8, 4, 4)),  # ⌊16.8⌋, ⌊8.4⌋, and the rest
        ([100.0, 1.0, 1.0], 6, (4, 1, 1)),
    ):
        assert parts(split(*pipeline_of(speeds, blocks), "holmes")) == expected


def test_holmes_takes_the_speeds_that_clusters_reached_in_training():
    """The same GPUs, joined by InfiniBand and by RoCE, reached 197 and 160 TFLOP/s (Table 1)."""
    slots, *others = pipeline_of([1.0, 1.0], 30)
    measured = [replace(slot, training_speed=speed) for slot, speed in zip(slots, (160.0, 197.0), strict=True)]
    assert parts(split(measured, *others, "holmes")) == (13, 17)
    assert parts(split([measured[0], slots[1]], *others, "holmes")) == (15, 15)


def test_autohet_has_the_smallest_maximum_load_that_fits():
    random = np.random.default_rng(3)
    for _ in range(100):
        stages, blocks = int(random.integers(1, 5)), int(random.integers(4, 10))
        speeds = random.integers(1, 5, stages).astype(float).tolist()
        pipeline = pipeline_of(speeds, blocks, memory=random.choice([4.0, 8.0, 12.0, 100.0], stages).tolist())

        def load(bounds: Bounds, speeds: list[float] = speeds) -> float:
            return max(n / speed for n, speed in zip(parts(bounds), speeds, strict=True))

        if (least := pipeline.min_of(load)) < np.inf:
            assert load(split(*pipeline, "autohet")) == pytest.approx(least)
        else:
            with pytest.raises(ValueError, match="no split fits in memory"):
                split(*pipeline, "autohet")


def every_choice(pipeline: Pipeline, bounds: Bounds) -> list[tuple[tuple[bool, ...], float, bool]]:
    """For every choice of stages that recompute: the choice, the seconds, and whether updates were left out."""
    found = []
    for chosen in itertools.product(*[(False, True) if slot.recomputed else (False,) for slot in pipeline.slots]):
        slots = []
        for slot, again in zip(pipeline.slots, chosen, strict=True):
            costs, memory = slot.recomputed if again and slot.recomputed else (slot.costs, slot.memory_bytes)
            slots.append(Slot(slot.name, costs, memory))
        cost = pipeline._replace(slots=slots).cost(bounds)
        if cost.fits:
            found.append((chosen, cost.seconds, cost.seconds - max(cost.update_seconds)))
    return found


@pytest.mark.parametrize("seed", range(120 if IS_THOROUGH else 40))
def test_each_cut_costs_what_the_best_choice_costs(seed: int) -> None:
    random = np.random.default_rng(seed)
    plain = random_pipeline(random, 3, 5)

    def may_recompute(slot: Slot) -> Slot:
        costs, share = slot.costs, float(random.uniform(0, 0.5))
        backward, kept = costs.backward_seconds + costs.forward_seconds, share * costs.activation_bytes
        again = replace(costs, backward_seconds=backward, activation_bytes=kept)
        return slot if random.random() < 0.2 else replace(slot, recomputed=(again, slot.memory_bytes - 1.0))

    slots, hops = [may_recompute(slot) for slot in plain.slots], plain.hops
    # Plans have at least as many micro-batches as stages.
    pipeline = Pipeline(slots, hops, max(plain.micro_batches, len(slots)))
    bounds = all_bounds(len(slots[0].costs.forward_seconds), len(slots))
    assert bounds is not None
    times = AllCuts(bounds).times(slots, hops).seconds(pipeline.micro_batches)
    found, shortest = [], np.inf
    for cut in map(tuple, bounds.tolist()):
        choices = every_choice(pipeline, cut)
        cost = pipeline.cost(cut)
        assert cost.fits == bool(choices)
        if choices:
            chosen, seconds, _ = min(choices, key=lambda each: each[1:2])
            assert cost.seconds == pytest.approx(seconds, rel=1e-12)
            if cost.recompute:
                assert sum(cost.recompute) <= sum(chosen)
        found.append(min((seconds for _, seconds, _ in choices), default=np.inf))
        shortest = min(shortest, *(without for _, _, without in choices), np.inf)
    np.testing.assert_allclose(times, found, rtol=1e-12)
    if shortest == np.inf:
        with pytest.raises(ValueError, match="no split fits in memory"):
            split(*pipeline)
    else:
        cost = pipeline.cost(split(*pipeline))
        assert cost.seconds - max(cost.update_seconds) == pytest.approx(shortest, rel=1e-9)
