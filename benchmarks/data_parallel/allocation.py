"""Compare batch allocation with an exhaustive search, and measure how long it takes. Nothing is trained.

On small random clusters, the exhaustive search tries every division of the samples, every number of micro-steps and
every micro-batch. Times are measured on clusters that are too large for such a search.
"""

from __future__ import annotations

import argparse
import time
from functools import lru_cache
from itertools import combinations
from statistics import mean

import numpy as np

from benchmarks.common import print_table
from colossal_hetero.planner import Curve, allocate

SETTINGS = ((0, "shared"), (1, "shared"), (2, "shared"), (3, "shared"), (0, "per_rank"), (1, "per_rank"))
CLUSTERS = ((1024, 8, 64), (1024, 8, 512), (2, 2, 64), (2, 2, 512), (2, 2, 65536), (1024, 1024, 64))
"""Number of devices, number of kinds, and largest micro-batch."""


@lru_cache(maxsize=256)
def divisions(samples: int, ranks: int) -> np.ndarray:
    """All divisions of ``samples`` among ``ranks``, as an array ``[divisions, ranks]``."""
    places = list(combinations(range(samples + ranks - 1), ranks - 1))
    bars = np.array(places, dtype=int).reshape(len(places), ranks - 1)
    ends = np.pad(bars, ((0, 0), (1, 1)), constant_values=((0, 0), (-1, samples + ranks - 1)))
    return np.diff(ends, axis=1) - 1


@np.errstate(invalid="ignore")
def exhaustive_seconds(curves: list[Curve], samples: int, stage: int, accumulation: str, communication: float) -> float:
    """The shortest possible wall time."""
    # Indices are rank and micro-batch. Infinity marks micro-batches that do not fit. Zero of them take 0·inf, which is
    # not a number; np.where discards these values below.
    seconds = np.full((len(curves), samples + 1), np.inf)
    for row, curve in zip(seconds, curves, strict=True):
        held = curve.seconds[: samples + 1]
        row[: len(held)] = held
    every = np.arange(len(curves))
    if stage >= 2:
        step = [0.0] + [
            float(seconds[every, divisions(count, len(curves))].max(axis=1).min()) + communication
            for count in range(1, samples + 1)
        ]
        return min(samples // size * step[size] + step[samples % size] for size in range(1, samples + 1))
    divided = divisions(samples, len(curves))
    if accumulation == "per_rank":
        sizes = np.arange(1, samples + 1)
        counts = np.arange(1, samples + 1)[:, None]
        rest = np.where(counts % sizes > 0, seconds[:, counts % sizes], 0.0)
        full = np.where(counts // sizes > 0, counts // sizes * seconds[:, sizes][:, None, :], 0.0)
        costs = np.concatenate([seconds[:, :1], (full + rest).min(axis=2)], axis=1)
        return float(costs[every, divided].max(axis=1).min()) + communication
    best = np.inf
    for steps in range(1, samples + 1):
        whole, larger = np.divmod(np.arange(samples + 1), steps)
        more = np.where(larger > 0, larger * seconds[:, np.minimum(whole + 1, samples)], 0.0)
        costs = (steps - larger) * seconds[:, whole] + more
        best = min(best, float(costs[every, divided].max(axis=1).min()))
    return best + communication


def random_curve(random: np.random.Generator, most: int) -> Curve:
    """A random time curve: straight, in steps, or with random increments."""
    batches = np.arange(1, random.integers(1, most + 1) + 1)
    fixed, slope = random.uniform(0, 3), random.uniform(0.05, 2)
    shape = random.integers(3)
    if shape == 0:
        return Curve.from_seconds(fixed + slope * batches)
    if shape == 1:
        return Curve.from_seconds(fixed + slope * np.ceil(batches / random.integers(2, 5)))
    return Curve.from_seconds(fixed + np.cumsum(random.exponential(slope, len(batches))))


def compare(clusters: int) -> list[tuple[object, ...]]:
    rows = []
    for number, (stage, accumulation) in enumerate(SETTINGS):
        random = np.random.default_rng(number)
        equal, worst, uniform, flops = 0, 1.0, [], []
        for _ in range(clusters):
            kinds = [random_curve(random, 8) for _ in range(3)]
            curves = [kinds[kind] for kind in random.integers(3, size=random.integers(2, 5))]
            samples, communication = int(random.integers(1, 17)), float(random.choice([0.0, random.uniform(0, 3)]))
            best = exhaustive_seconds(curves, samples, stage, accumulation, communication)
            walls = {
                method: allocate(
                    curves,
                    samples,
                    stage,
                    method=method,
                    accumulation=accumulation,
                    communication_seconds=communication,
                    flops=[curve.peak_speed for curve in curves],
                ).wall_seconds
                for method in ("exact", "uniform", "flops")
            }
            equal += abs(walls["exact"] / best - 1.0) < 1e-9
            worst = max(worst, walls["exact"] / best)
            uniform.append(walls["uniform"] / best)
            flops.append(walls["flops"] / best)
            assert min(uniform[-1], flops[-1]) > 1 - 1e-9, "the exhaustive search missed an allocation"
        rows.append((stage, accumulation, f"{equal} of {clusters}", worst, mean(uniform), mean(flops)))
    return rows


def straight(random: np.random.Generator, most: int) -> Curve:
    slow = random.uniform(0.5, 3.0)
    return Curve.from_seconds(slow * (0.02 + 0.01 * np.arange(1, most + 1)))


def rough(random: np.random.Generator, most: int) -> Curve:
    return Curve.from_seconds(random.uniform(0.5, 3.0) * (0.02 + np.cumsum(random.exponential(0.01, most))))


def times(repeats: int) -> list[tuple[object, ...]]:
    rows = []
    for devices, kinds, most in CLUSTERS:
        cells = []
        for stage, accumulation in SETTINGS:
            seconds = []
            for make in (straight, rough):
                random = np.random.default_rng(devices + most)
                different = [make(random, most) for _ in range(kinds)]
                curves = [different[rank % kinds] for rank in range(devices)]
                for _ in range(repeats):
                    start = time.perf_counter()
                    allocate(curves, 65536, stage, accumulation=accumulation, communication_seconds=0.01)
                    seconds.append(time.perf_counter() - start)
            cells.append(max(seconds))
        rows.append((f"{devices:,} of {kinds:,}", most, *cells))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=1000, help="random clusters per setting (default: 1000)")
    parser.add_argument("--repeats", type=int, default=3, help="timings of each allocation (default: 3)")
    arguments = parser.parse_args()
    print_table(
        "Wall time relative to the optimum of exhaustive search: 2 to 4 ranks of 3 kinds, global batches of 1 to 16",
        ("stage", "accumulation", "equal", "worst / optimum", "uniform / optimum, mean", "flops / optimum, mean"),
        compare(arguments.clusters),
    )
    print_table(
        "\nSeconds to allocate a global batch of 65,536: the longest of all repeats, on straight and on rough curves",
        ("devices of kinds", "max batch", *(f"stage {stage}, {accumulation}" for stage, accumulation in SETTINGS)),
        times(arguments.repeats),
    )


if __name__ == "__main__":
    main()
