"""Quality of the split methods. Nothing is trained."""

from __future__ import annotations

from itertools import combinations, pairwise
from statistics import mean
from typing import NamedTuple

import numpy as np

from benchmarks.common import print_table, read_options
from colossal_hetero.planner.cluster.topology import Channel
from colossal_hetero.planner.cost.pass_order import one_forward_one_backward
from colossal_hetero.planner.cost.simulate import ChunkTimes, Timeline
from colossal_hetero.planner.profile.layer_costs import LayerCosts
from colossal_hetero.planner.stages.pipeline import PipelineCost, Slot, evaluate
from colossal_hetero.planner.stages.split_methods import METHODS, split

BLOCK_SECONDS = 0.03
"""Forward plus backward pass of a block on the slowest kind of device."""
SPEEDS = (1.0, 2.2, 3.7)
"""Speed of each kind of device, relative to the slowest."""
GIGABYTES = (16.0, 24.0, 40.0)
"""Memory of each kind of device."""
MODEL_GIGABYTES = 60.0
"""Parameters, gradients and optimizer state of a model for 16 stages."""


class Pipeline(NamedTuple):
    slots: list[Slot]
    hops: list[Channel]
    micro_batches: int

    def cost(self, bounds: tuple[int, ...]) -> PipelineCost:
        return evaluate(*self, bounds)


def mixed(random: np.random.Generator, stages: int, kinds: int, blocks: int, micro_batches: int) -> Pipeline:
    """A random pipeline with equally many slots of each kind, slots of one kind in one node.

    The last block includes the head and takes 1.6 times as long as a block.
    """
    weight = random.uniform(0.8, 1.2, blocks)
    weight[-1] *= 1.6
    made = []
    for kind in range(kinds):
        forward = BLOCK_SECONDS / 3 * weight / (SPEEDS[kind] * random.uniform(0.9, 1.1))
        state = weight / weight.sum() * MODEL_GIGABYTES * stages / 16 * 1e9
        sizes = np.full(blocks, 2e7)
        made.append(LayerCosts(forward, 2 * forward, forward / 3, state, state / 4, state / 60, sizes))
    which = [stage * kinds // stages for stage in range(stages)]
    slots = [Slot(f"slot {i}", made[kind], GIGABYTES[kind] * 1e9) for i, kind in enumerate(which)]
    inside, outside = Channel("NVLink", 200e9, 1e-5), Channel("InfiniBand", 20e9, 1e-5)
    return Pipeline(slots, [inside if a == b else outside for a, b in pairwise(which)], micro_batches)


def all_splits(stages: int, blocks: int) -> list[tuple[int, ...]]:
    return [(0, *cuts, blocks) for cuts in combinations(range(1, blocks), stages - 1)]


def methods(pipelines: int) -> list[tuple[object, ...]]:
    """Table of all methods relative to `exact`, by the formula."""
    rows = []
    for stages, kinds, blocks in ((4, 2, 24), (8, 3, 48), (16, 3, 96)):
        for count in (stages, 4 * stages):
            random = np.random.default_rng(0)
            ratios: dict[str, list[float]] = {method: [] for method in METHODS}
            over = dict.fromkeys(METHODS, 0)
            for _ in range(pipelines):
                pipeline = mixed(random, stages, kinds, blocks, count)
                best = pipeline.cost(split(*pipeline)).seconds
                for method in METHODS:
                    try:
                        cost = pipeline.cost(split(*pipeline, method))
                    except ValueError:
                        over[method] += 1
                        continue
                    over[method] += not cost.fits
                    ratios[method].append(cost.seconds / best)
            rows.append(
                (
                    f"{stages} of {kinds}",
                    blocks,
                    count,
                    *(
                        (f"{mean(ratios[method]):.3f}" if ratios[method] else "")
                        + (f" ({over[method]} do not fit)" if over[method] else "")
                        for method in METHODS[1:]
                    ),
                )
            )
    return rows


def simulated_seconds(pipeline: Pipeline, bounds: tuple[int, ...]) -> float:
    """Time of an iteration by the event simulation."""
    cost = pipeline.cost(bounds)
    parts = (cost.forward_seconds, cost.backward_seconds, (*cost.hop_seconds, 0.0))
    times = ChunkTimes(*map(np.array, (*parts, cost.update_seconds)))
    return Timeline(one_forward_one_backward(len(pipeline.slots), pipeline.micro_batches), times).seconds


def under_simulation(pipelines: int) -> list[tuple[object, ...]]:
    """Table of the formula and of `exact` under the event simulation."""
    rows = []
    for stages, count in ((2, 4), (3, 4), (4, 4), (2, 8), (4, 8), (4, 16), (4, 64)):
        random = np.random.default_rng(0)
        closed, exact = [], []
        for _ in range(pipelines):
            pipeline = mixed(random, stages, 2, 9, count)
            every = [one for one in all_splits(stages, 9) if pipeline.cost(one).fits]
            best = min(simulated_seconds(pipeline, one) for one in every)
            found = split(*pipeline)
            simulated = simulated_seconds(pipeline, found)
            closed.append(pipeline.cost(found).seconds / simulated)
            exact.append(simulated / best)
        rows.append((stages, count, mean(closed), mean(exact), max(exact)))
    return rows


def main() -> None:
    arguments = read_options(__doc__, mixed=20)
    print_table(
        "Iteration time of the methods relative to 'exact', mean (formula)",
        ("stages of kinds", "blocks", "micro-batches", *METHODS[1:]),
        methods(arguments.mixed),
    )
    print_table(
        "\nUnder the event simulation: formula / simulated time, and 'exact' "
        "relative to the best of all splits under the simulation; 9 blocks, 2 kinds",
        ("stages", "micro-batches", "formula / simulated", "exact, mean", "worst"),
        under_simulation(arguments.mixed),
    )


if __name__ == "__main__":
    main()
