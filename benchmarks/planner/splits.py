"""Quality of the split methods, and the time that they and the event simulation take. Nothing is trained.

On random small pipelines, `exact`, which tries a few orders of the slots, is compared with an exhaustive search over
all orders and all contiguous splits. The tables of methods and of times use larger pipelines.
"""

from __future__ import annotations

import argparse
import time
from itertools import combinations, permutations
from statistics import mean

import numpy as np

from benchmarks.common import print_table
from colossal_hetero.planner.cluster.topology import Channel
from colossal_hetero.planner.cost.pass_order import one_forward_one_backward
from colossal_hetero.planner.cost.simulate import ChunkTimes, Timeline, Transfers, simulate_passes
from colossal_hetero.planner.profile.layer_costs import LayerCosts
from colossal_hetero.planner.stages.pipeline import Pipeline, Slot, Split, evaluate
from colossal_hetero.planner.stages.split_methods import METHODS, split

BLOCK_SECONDS = 0.03
"""Forward plus backward pass of a block on the slowest kind of device."""
SPEEDS = (1.0, 2.2, 3.7)
"""Speed of each kind of device, relative to the slowest."""
GIGABYTES = (16.0, 24.0, 40.0)
"""Memory of each kind of device."""
MODEL_GIGABYTES = 60.0
"""Parameters, gradients and optimizer state of a model for 16 stages."""


def small(random: np.random.Generator) -> Pipeline:
    """A random pipeline: 1 to 4 slots of up to 3 kinds in 3 nodes, up to 8 blocks, sometimes with little memory."""
    stages = int(random.integers(1, 5))
    blocks = int(random.integers(stages, 9))
    kinds = []
    for _ in range(3):
        work = random.uniform(1, 3, blocks) if random.random() < 0.5 else np.full(blocks, random.uniform(1, 3))
        outputs = random.uniform(1, 10, blocks) if random.random() < 0.5 else np.full(blocks, 3.0)
        update = random.choice([0.0, 0.3]) * random.uniform(1, 2, blocks)
        state, activations = random.uniform(1, 5, blocks), random.uniform(0.5, 2, blocks)
        memory = float(random.choice([1e3, random.uniform(6, 40)]))
        kinds.append((LayerCosts(work, 2 * work, update, state, state, activations, outputs), memory))
    which, nodes = random.integers(3, size=stages), random.integers(3, size=stages)
    slots = tuple(Slot(f"slot {number}", *kinds[kind]) for number, kind in enumerate(which))
    inside, outside = Channel("PCIe", 30.0), Channel("Ethernet", float(random.choice([30.0, 5.0])))
    channels = tuple(tuple(inside if a == b else outside for b in nodes) for a in nodes)
    return Pipeline(slots, channels, int(random.choice([1, 2, 4, 8, 32])))


def mixed(
    random: np.random.Generator, stages: int, kinds: int, blocks: int, micro_batches: int, equal_blocks: bool = False
) -> Pipeline:
    """A random pipeline with equally many slots of each kind, slots of one kind in one node.

    The last block includes the head and takes 1.6 times as long as a block.
    """
    weight = np.full(blocks, 1.0) if equal_blocks else random.uniform(0.8, 1.2, blocks)
    weight[-1] *= 1.6
    made = []
    for kind in range(kinds):
        forward = BLOCK_SECONDS / 3 * weight / (SPEEDS[kind] * random.uniform(0.9, 1.1))
        state = weight / weight.sum() * MODEL_GIGABYTES * stages / 16 * 1e9
        sizes = np.full(blocks, 2e7)
        made.append(LayerCosts(forward, 2 * forward, forward / 3, state, state / 4, state / 60, sizes))
    which = [stage * kinds // stages for stage in range(stages)]
    slots = tuple(Slot(f"slot {i}", made[kind], GIGABYTES[kind] * 1e9) for i, kind in enumerate(which))
    inside, outside = Channel("NVLink", 200e9, 1e-5), Channel("InfiniBand", 20e9, 1e-5)
    channels = tuple(tuple(inside if a == b else outside for b in which) for a in which)
    return Pipeline(slots, channels, micro_batches)


def all_splits(pipeline: Pipeline) -> list[Split]:
    """All orders of the slots with all contiguous splits."""
    stages, blocks = len(pipeline.slots), pipeline.blocks
    return [
        Split(order, (0, *cuts, blocks))
        for order in permutations(range(stages))
        for cuts in combinations(range(1, blocks), stages - 1)
    ]


def against_exhaustive_search(pipelines: int, seed: int) -> list[tuple[object, ...]]:
    """Table of `exact` against the optimum of all splits."""
    random = np.random.default_rng(seed)
    equal, worst, impossible, missed = 0, 1.0, 0, 0
    for _ in range(pipelines):
        pipeline = small(random)
        costs = [evaluate(pipeline, one) for one in all_splits(pipeline)]
        best = min((cost.seconds for cost in costs if cost.fits), default=np.inf)
        try:
            found = evaluate(pipeline, split(pipeline))
        except ValueError:
            impossible += best == np.inf
            missed += best < np.inf
            continue
        assert found.fits
        equal += abs(found.seconds / best - 1.0) < 1e-9
        worst = max(worst, found.seconds / best)
    return [(f"{equal} of {pipelines - impossible}", worst, missed, impossible)]


def methods(pipelines: int, seed: int) -> list[tuple[object, ...]]:
    """Table of all methods relative to `exact`, by the formula."""
    rows = []
    for stages, kinds, blocks in ((4, 2, 24), (8, 3, 48), (16, 3, 96)):
        for count in (stages, 4 * stages):
            random = np.random.default_rng(seed)
            ratios: dict[str, list[float]] = {method: [] for method in METHODS}
            over = dict.fromkeys(METHODS, 0)
            for _ in range(pipelines):
                pipeline = mixed(random, stages, kinds, blocks, count)
                best = evaluate(pipeline, split(pipeline)).seconds
                for method in METHODS:
                    try:
                        cost = evaluate(pipeline, split(pipeline, method))
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


def simulated_seconds(pipeline: Pipeline, division: Split) -> float:
    """Time of an iteration by the event simulation."""
    cost = evaluate(pipeline, division)
    parts = (cost.forward_seconds, cost.backward_seconds, cost.schedule_seconds, (*cost.hop_seconds, 0.0))
    times = ChunkTimes(*map(np.array, (*parts, cost.update_seconds)))
    return Timeline(one_forward_one_backward(len(pipeline.slots), pipeline.micro_batches), times).seconds


def under_simulation(pipelines: int, seed: int) -> list[tuple[object, ...]]:
    """Table of the formula and of `exact` under the event simulation."""
    rows = []
    for stages, count in ((2, 4), (3, 4), (4, 4), (2, 8), (4, 8), (4, 16), (4, 64)):
        random = np.random.default_rng(seed)
        closed, exact = [], []
        for _ in range(pipelines):
            pipeline = mixed(random, stages, 2, 9, count)
            best = min(simulated_seconds(pipeline, one) for one in all_splits(pipeline) if evaluate(pipeline, one).fits)
            found = split(pipeline)
            simulated = simulated_seconds(pipeline, found)
            closed.append(evaluate(pipeline, found).seconds / simulated)
            exact.append(simulated / best)
        rows.append((stages, count, mean(closed), mean(exact), max(exact)))
    return rows


def split_times(repeats: int, seed: int) -> list[tuple[object, ...]]:
    """Table of the seconds that `exact` takes."""
    rows = []
    for stages, kinds, blocks in ((8, 3, 48), (16, 2, 96), (16, 3, 96), (32, 3, 96), (64, 3, 128)):
        cells = []
        for equal_blocks in (True, False):
            times = []
            for number in range(repeats):
                pipeline = mixed(np.random.default_rng(seed + number), stages, kinds, blocks, 4 * stages, equal_blocks)
                start = time.perf_counter()
                split(pipeline)
                times.append(time.perf_counter() - start)
            cells.append(max(times))
        rows.append((f"{stages} of {kinds}", blocks, *cells))
    return rows


def simulation_times(repeats: int, seed: int) -> list[tuple[object, ...]]:
    """Table of the seconds that the event simulation takes."""
    rows = []
    modes: tuple[Transfers, ...] = ("blocking", "overlapped")
    for stages, replicas, count in ((8, 64, 64), (64, 8, 512), (256, 1, 1024)):
        random = np.random.default_rng(seed)
        for transfers in modes:
            seconds = []
            for _ in range(repeats):
                times = random.uniform(0.5, 1.5, (replicas, stages))
                start = time.perf_counter()
                for forward in times:
                    none = np.zeros(stages)
                    given = ChunkTimes(forward, 2 * forward, none, forward / 10, none)
                    simulate_passes(one_forward_one_backward(stages, count), given, transfers)
                seconds.append(time.perf_counter() - start)
            rows.append((stages * replicas, stages, replicas, count, transfers, max(seconds)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, default=1000, help="random small pipelines (default: 1000)")
    parser.add_argument("--mixed", type=int, default=20, help="random larger pipelines per row (default: 20)")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of each timing (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random pipelines (default: 0)")
    arguments = parser.parse_args()
    print_table(
        "Iteration time of 'exact' relative to the optimum of all splits and orders: 1 to 4 slots, up to 8 blocks",
        ("equal to the optimum", "worst / optimum", "no split found, but one fits", "no split fits"),
        against_exhaustive_search(arguments.pipelines, arguments.seed),
    )
    print_table(
        "\nIteration time of the methods relative to 'exact', mean (formula)",
        ("stages of kinds", "blocks", "micro-batches", *METHODS[1:]),
        methods(arguments.mixed, arguments.seed),
    )
    print_table(
        "\nUnder the event simulation: formula / simulated time, and 'exact' "
        "relative to the best of all splits and orders under the simulation; 9 blocks, 2 kinds",
        ("stages", "micro-batches", "formula / simulated", "exact, mean", "worst"),
        under_simulation(arguments.mixed, arguments.seed),
    )
    print_table(
        "\nSeconds of 'exact', the longest of all repeats",
        ("stages of kinds", "blocks", "equal blocks", "unequal blocks"),
        split_times(arguments.repeats, arguments.seed),
    )
    print_table(
        "\nSeconds to simulate an iteration of replicas that all differ, the longest of all repeats",
        ("devices", "stages", "replicas", "micro-batches", "transfers", "seconds"),
        simulation_times(arguments.repeats, arguments.seed),
    )


if __name__ == "__main__":
    main()
